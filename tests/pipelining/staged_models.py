"""Models that `maxmoe.pipeline` cuts, with their batches: decoders, adapters, models of transformers and of users."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward, ZeroComputation, quantize_experts
from maxmoe.families.zaya import RouterMLP
from maxmoe.integrations.transformers import replace_moe_blocks
from maxmoe.models import DecoderConfig
from maxmoe.parallel import Declaration, PipelineParts
from support import staged_decoder
from support.adapted_decoders import add_adapters
from support.parallel_decoder import LENGTH, batch, decoder
from support.small_models import import_models, model_of
from support.staged_decoder import DEEPSEEK, MOE, TWO_BLOCKS, Step, config, step_of

import_models("mixtral", "gpt_oss")


@dataclass(frozen=True)
class Subject:
    """A model with the same values at each call of `build`, and its batch."""

    build: Callable[[], nn.Module]
    inputs: Tensor = batch()[0]
    targets: Any = batch()[1]
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Tensor] = staged_decoder.loss

    def step(self, count: int, aux_loss_scale: float) -> Step:
        """The step of one process over `count` micro-batches."""
        model = self.build()
        for layer in model.modules():
            if isinstance(layer, MoEFeedForward):
                layer.aux_loss_scale = aux_loss_scale
        options: Any = {"count": count, "aux_loss_scale": aux_loss_scale, "loss": self.loss, **self.options}
        return step_of(model, self.inputs, self.targets, **options)


def adapted(config: DecoderConfig, format: str | None = None) -> nn.Module:
    """A decoder whose experts have adapters around them; PEFT's wrapper cannot be partitioned."""
    model: Any = decoder(config)
    if format is not None:
        quantize_experts(model.requires_grad_(False), format)
    return add_adapters(model).base_model.model


def of_transformers(preset: str) -> Subject:
    """A model with layers of maxmoe in the place of its sparse blocks, and padding."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = model_of(preset, num_hidden_layers=4).double()
        replace_moe_blocks(model)
        parts = PipelineParts(("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"))
        model.declaration = Declaration(pipeline_parts=parts)
        return model

    mask = torch.ones_like(batch()[0])
    mask[1, :2] = 0
    return Subject(build, options={"attention_mask": mask, "use_cache": False})


def padded(config: DecoderConfig, **options: Any) -> Subject:
    """Documents and padding; the second of two ranks has no tokens in both micro-batches."""
    tokens, targets = batch()
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[[2, 3, 6, 7]] = False
    documents = torch.arange(LENGTH).ge(3).long().repeat(len(tokens), 1)
    options |= {"token_mask": mask, "document_ids": documents}
    return Subject(partial(decoder, config), tokens, targets.masked_fill(~mask, -100), options)


X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PARTS = PipelineParts(("first",), "blocks", ("last",))


class Model(nn.Module):
    """Four blocks; the forward calls `step` for each block."""

    def __init__(
        self,
        step: Callable[..., Tensor] | None = None,
        make_block: Callable[[], nn.Module] = lambda: nn.Linear(6, 6),
        parts: PipelineParts = PARTS,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(make_block() for _ in range(4))
        self.declaration = Declaration(pipeline_parts=parts)
        self._step = step
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if self._step is None else self._step(self, index, block, x)
        return self.last(x)


class Scaled(Model):
    """What it computes outside of its parts, every stage would compute."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(2 * x)


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += self.weight[0]
        return x


class Powered(nn.Linear):
    def forward(self, x: Tensor, power: int) -> Tensor:
        return super().forward(x) * 2.0**power


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Sum(nn.Module):
    """The sum of two parameters gives both the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.one + self.other)


class Stateful(nn.Module):
    """Hidden states of width 4 and, beside them, the state of the router, which a stage passes on with them."""

    def __init__(self) -> None:
        super().__init__()
        sizes: Any = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 3, "top_k": 1, "normalization": "none"}
        router = RouterMLP(hidden_size=2, takes_state=True)
        self.layer = MoEFeedForward(MoEConfig(**sizes, zero_computation=ZeroComputation(zero=1), router=router))

    def forward(self, stream: Tensor) -> Tensor:
        x, state = stream.split((4, 2), -1)
        out, state = self.layer(x, None, state)
        return torch.cat((x + out, state), -1)


def with_shared_norm() -> Model:
    model, norm = Model(), nn.LayerNorm(6)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), norm if i > 1 else nn.Identity()) for i in range(4))
    return model.double()


def with_repeated_activation() -> Model:
    model, activation = Model(), nn.SiLU()
    model.blocks = nn.ModuleList([nn.Linear(6, 6), activation, nn.Linear(6, 6), activation])
    return model.double()


class Classifier(nn.Module):
    """Layers that add their auxiliary loss themselves, in a list inside of another module; two share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        moe = MoEConfig(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2, load_balance_loss_weight=0.1)
        self.encoder = nn.ModuleDict({"inputs": nn.Linear(3, 8), "layers": nn.ModuleList()})
        for _ in range(4):
            self.encoder["layers"].append(nn.Sequential(nn.LayerNorm(8), MoEFeedForward(moe)))
        self.encoder["layers"][3][0].weight = self.encoder["layers"][2][0].weight
        self.head = nn.Linear(8, 2)
        parts = PipelineParts(("encoder.inputs",), "encoder.layers", ("head",), removes_blocks=True)
        self.declaration = Declaration(pipeline_parts=parts)
        self.double()

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        x = self.encoder["inputs"](x)
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            x = x + scale * layer(x)
        return {"scores": self.head(x)}


def class_loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["scores"].flatten(0, 1), targets["labels"].flatten(), reduction="sum")


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


SPARSE = config("deepseek_v3", num_layers=2, num_dense_layers=0)
# Layers of all stages select by ids of tokens and of documents.
BY_IDS = config("hash", moe=(MOE["hash"], MOE["pools"], MOE["hash"]))
OWN: dict[str, Callable[[], nn.Module]] = {
    "numbers its blocks": lambda: Model(lambda _, index, block, x: block(x, index), partial(Powered, 6, 6)),
    "indexes its blocks": lambda: Model(lambda model, index, _, x: model.blocks[index](x)),
    "modifies in place": lambda: Model(make_block=partial(InPlace, 6, 6)),
    "blocks return pairs": lambda: Model(
        lambda _model, _index, block, x: block(x)[0],
        partial(Pair, 6, 6),
        replace(PARTS, absent_block_output=lambda x: (x, None)),
    ),
    "sums of parameters": lambda: Model(make_block=Sum),
    "a state of the router": lambda: Model(make_block=Stateful),
    "a norm of two blocks": with_shared_norm,
    "an activation that is several blocks": with_repeated_activation,
}
SUBJECTS: dict[str, Subject] = {
    **{family: Subject(partial(decoder, config(family))) for family in ("mixtral", "deepseek_v3", "gpt_oss")},
    "two blocks": Subject(partial(decoder, TWO_BLOCKS)),
    "sparse blocks": Subject(partial(decoder, SPARSE)),
    "tied embeddings": Subject(partial(decoder, replace(TWO_BLOCKS, tie_embeddings=True))),
    "padding and documents": padded(SPARSE),
    "routers of ids": padded(BY_IDS, token_ids=batch()[0]),
    "adapters": Subject(partial(adapted, DEEPSEEK)),
    "adapters of nvfp4 experts": Subject(partial(adapted, TWO_BLOCKS, "nvfp4")),
    "mixtral of transformers": of_transformers("mixtral"),
    "gpt_oss of transformers": of_transformers("gpt_oss"),
    "classifier": Subject(
        Classifier,
        torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        {"labels": torch.arange(40).view(8, 5) % 2},
        {"scale": 0.5},
        class_loss,
    ),
    **{name: Subject(build, X, X, loss=squares) for name, build in OWN.items()},
}
