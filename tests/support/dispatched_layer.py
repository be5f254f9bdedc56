"""One step of a small MoE layer, in one process and in parts on a mesh, and their comparison."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import ExpertNorms, MoE, MoEConfig, MoEOutput, ZeroComputation
from maxmoe.expert_load import MoEStats
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.nn import RoutingRecord, Selection
from maxmoe.parallel import ParameterSharding
from support.moe_layers import DEEPSEEK, GPT_OSS, INKLING, LLAMA4, LONGCAT_FLASH, LOSSES, MUSE_SPARK
from support.parts import assert_part, assert_same

NUM_EXPERTS = 16
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_experts": NUM_EXPERTS}
FAMILIES = {
    name: MoEConfig(**{**SIZES, "top_k": 3, **LOSSES, **options})
    for name, options in {
        "mixtral": {"top_k": 2},
        "deepseek_v3": {**DEEPSEEK, "num_groups": 4},
        "gpt_oss": {**GPT_OSS, "top_k": 4},
        "llama4": {**LLAMA4, "top_k": 1},
        "longcat_flash": {
            **{**LONGCAT_FLASH, "zero_computation": ZeroComputation(zero=2, copy=5, constant=3)},
            **{"top_k": 4, "num_shared_experts": 1},
        },
        "inkling": {**INKLING, "num_groups": 4, "top_k_groups": 2},
        "muse_spark": {**MUSE_SPARK, "expert_norms": ExpertNorms(latent_in=True, latent_out=True, output=True)},
        "kolibri1": {"num_groups": 4, "top_k_groups": 2, "router": Selection(by="logits", other_groups="zero")},
        "hash": {"score_function": "sqrtsoftplus", "router": HashRouting(num_ids=11)},
        "pools": {"router": DocumentPools(min_size=4, max_size=9)},
        "nemotron_h": {
            **{"latent_size": 4, "score_function": "sigmoid", "activation": "relu2", "gated": False},
            **{"expert_bias": True, "num_shared_experts": 1},
        },
    }.items()
}
LOADS = (
    "of the router",
    "even",
    "half of the experts without tokens",
    "all to one expert",
    "a quarter to one expert",
    "three quarters to one expert",
)


@dataclass(frozen=True)
class Outcome:
    """Results of a step; gradients by the names of the parameters, and of "x", None of what is frozen."""

    hidden_states: Tensor
    aux_loss: Tensor
    stats: MoEStats
    gradients: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Tokens ``(B, S, D)``, the gradient of their output; experts ``(B, S, K)`` that replace the router's choice.

    With ids ``(B, S)`` for a router that takes them.
    """

    x: Tensor
    cotangent: Tensor
    experts: Tensor | None = None
    token_mask: Tensor | None = None
    router_inputs: Tensor | None = None

    def part(self, part: tuple[slice, ...]) -> "Batch":
        def cut(whole: Tensor | None) -> Tensor | None:
            return None if whole is None else whole[part[:2]]

        return Batch(self.x[part], self.cotangent[part], *map(cut, (self.experts, self.token_mask, self.router_inputs)))


def make_layer(config: MoEConfig, dtype: torch.dtype = torch.float64, **parts: Any) -> MoE:
    """A layer with the same random values at every call, in all parameters and buffers; parts as `MoE` takes them."""
    generator = torch.Generator().manual_seed(0)
    layer = MoE(config, dtype=dtype, **parts)
    with torch.no_grad():
        for value in filter(Tensor.is_floating_point, layer.state_dict().values()):
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    if config.load_balance_scope == "step":
        maxmoe.StatsAccumulator(layer)
    return layer


def make_batch(
    config: MoEConfig, load: str, shape: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float64
) -> Batch:
    """A batch with the same random values at every call."""
    generator = torch.Generator().manual_seed(1)
    x, cotangent = torch.randn(2, *shape, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    slots = torch.arange(shape[0] * shape[1] * config.top_k).view(*shape, config.top_k)
    match load:
        case "of the router":
            experts = None
        case "even":
            experts = slots % config.num_selectable_experts
        case "half of the experts without tokens":
            experts = slots % (config.num_experts // 2)
        case "all to one expert":
            experts = torch.where(slots % config.top_k == 0, 1, -1)
        case "a quarter to one expert" | "three quarters to one expert":
            is_hot = slots % 4 < (1 if load == "a quarter to one expert" else 3)
            experts = (slots % config.num_selectable_experts).masked_fill(is_hot, 0)
        case _:
            raise ValueError(load)
    rule, ids = config.router_rule, None
    if rule.takes_ids is not None:
        # Documents from half of one part of a sequence to half of the next, and in all sequences.
        ids = torch.arange(x[..., 0].numel()).view(shape)
        ids = ids * 7 % rule.num_ids if rule.num_ids else (ids + 2) // 4 % 2
    return Batch(x, cotangent, experts, router_inputs=ids)


def take_step(
    layer: MoE,
    batch: Batch,
    forward: Callable[..., MoEOutput] | None = None,
    differentiate: Callable[[Tensor, Sequence[Tensor]], None] = lambda loss, _leaves: loss.backward(),
    *,
    trains_input: bool = True,
) -> Outcome:
    """Forward and backward, as a training loop does on every rank; `forward` is called in the place of the layer."""
    layer.zero_grad()
    torch.manual_seed(5)  # for noise and for sizes of pools, which every rank draws
    x = batch.x.detach().clone().requires_grad_(trains_input)
    leaves = {"x": x, **dict(layer.named_parameters())}
    record = None if batch.experts is None else RoutingRecord({"": [batch.experts]})
    with nullcontext() if record is None else maxmoe.replay_routing(layer, record, missing="zero"):
        ids = {} if batch.router_inputs is None else {"router_inputs": batch.router_inputs}
        output = (layer if forward is None else forward)(x, batch.token_mask, **ids)
        loss = (output.hidden_states * batch.cotangent).sum() + output.aux_loss
        differentiate(loss, [leaf for leaf in leaves.values() if leaf.requires_grad])
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return Outcome(output.hidden_states.detach(), output.aux_loss.detach(), output.stats, gradients)


def in_a_block(run: Callable[..., Any], layer: MoE) -> Callable[..., MoEOutput]:
    """The forward of a block with the layer between other operators, called by `run`."""

    def forward(x: Tensor, *arguments: Any, **named_arguments: Any) -> MoEOutput:
        stats = []

        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            output = layer(2 * x, *arguments, **named_arguments)
            stats.append(output.stats)
            return F.silu(output.hidden_states), output.aux_loss

        return MoEOutput(*run(block, x), stats[0])  # type: ignore[call-arg]

    return forward


def saved_on_cpu(block: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


non_reentrant = functools.partial(checkpoint, use_reentrant=False)
FORWARDS: dict[str, Callable[..., Any]] = {
    "plain": lambda block, x: block(x),
    "non-reentrant": non_reentrant,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "keep_routing": functools.partial(non_reentrant, context_fn=maxmoe.keep_routing),
    "nested": lambda block, x: non_reentrant(functools.partial(non_reentrant, block), x),
    "saved on the CPU": saved_on_cpu,
    "without early stop": functools.partial(non_reentrant, early_stop=False),
}


def check_part(
    got: Outcome,
    expected: Outcome,
    part: tuple[slice, ...],
    shardings: dict[str, ParameterSharding],
    tolerance: float = 1e-12,
) -> None:
    """Check that results of this rank are parts of one process's."""

    def check(got: Tensor, whole: Tensor, name: str, part: Any = ...) -> None:
        assert_same(got, whole[part], name, scale=whole if whole.numel() else None, tolerance=tolerance)

    check(got.hidden_states, expected.hidden_states, "hidden_states", part)
    check(got.aux_loss, expected.aux_loss, "aux_loss")
    check(got.stats.router_entropy, expected.stats.router_entropy, "entropy")
    for name in ("tokens_per_expert", "dropped"):
        value, whole = getattr(got.stats, name), getattr(expected.stats, name)
        assert value.equal(whole), f"{name}: {value.tolist()}, not {whole.tolist()}"
    assert got.gradients.keys() == expected.gradients.keys()
    for name, whole in expected.gradients.items():
        gradient, what = got.gradients[name], f"gradient of {name}"
        if whole is None:
            assert gradient is None, name
        elif name == "x":
            check(gradient, whole, what, part)
        else:
            assert_part(gradient, whole, shardings[name].sharding, what, tolerance=tolerance)
