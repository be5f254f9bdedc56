"""Decoders of five kinds in pipeline stages, and the step of one process that accumulates over micro-batches."""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.pipelining  # once, in the process that forks, and not in every rank
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe import MoEConfig, presets
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.parallel import token_sharding
from maxmoe.pipelining import Pipeline, PipelineOutput, pipeline
from maxmoe.sharding import Mesh
from support.parts import assert_same

BATCH, LENGTH, NUM_MICRO_BATCHES = 8, 6, 2
MOE: dict[str, MoEConfig] = {
    "mixtral": presets.mixtral(hidden_size=16, intermediate_size=8, num_experts=4, load_balance_loss_weight=0.1),
    "deepseek_v3": presets.deepseek_v3(
        hidden_size=16,
        intermediate_size=8,
        num_experts=8,
        top_k=3,
        num_groups=4,
        top_k_groups=2,
        load_balance_loss_weight=0.1,
        correction_bias_update_rate=0.01,
    ),
    "gpt_oss": presets.gpt_oss(
        hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, load_balance_loss_weight=0.1
    ),
    "hash": presets.mixtral(hidden_size=16, intermediate_size=8, num_experts=4, router=HashRouting(num_ids=13)),
    "pools": presets.mixtral(
        hidden_size=16, intermediate_size=8, num_experts=8, router=DocumentPools(min_size=3, max_size=3)
    ),
}
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "num_dense_layers": 1,
    "max_sequence_length": LENGTH,
}


def config(family: str, **changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**SIZES, "moe": MOE[family], **changes})


DEEPSEEK = config("deepseek_v3")
TWO_BLOCKS = config("deepseek_v3", num_layers=2)  # one for each of two stages, without and with experts
SPLIT = "interleaved_zero_bubble"  # a schedule with a split backward


def decoder(config: DecoderConfig) -> Decoder:
    """A decoder with parameters large enough to matter, the same on every rank."""
    torch.manual_seed(0)
    model = Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


@functools.cache
def batch(num_rows: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, SIZES["vocab_size"], (2, num_rows, LENGTH), generator=generator)
    return tokens, targets


def micro_batches(*tensors: Tensor, count: int = NUM_MICRO_BATCHES) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.tensor_split(count) for tensor in tensors), strict=True))


def loss(output: DecoderOutput, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


@dataclass(frozen=True)
class Step:
    """Results of one process for a batch in micro-batches."""

    loss: Tensor
    aux_loss: Tensor
    tokens_per_expert: list[Tensor]
    router_entropy: list[Tensor]
    gradients: dict[str, Tensor]


def step_of(
    model: Decoder, parts: list[tuple[Tensor, ...]], aux_loss_scale: float = 1.0, **options: list[Tensor]
) -> Step:
    """Accumulate gradients over the micro-batches, without dividing them."""
    outputs, losses = [], []
    for index, (tokens, targets) in enumerate(parts):
        output = model(tokens, **{name: values[index] for name, values in options.items()})
        losses.append(loss(output, targets))
        (losses[-1] + aux_loss_scale * output.aux_loss).backward()
        outputs.append(output)
    layers = list(zip(*(output.stats for output in outputs), strict=True))
    return Step(
        torch.stack(losses).sum().detach(),
        torch.stack([output.aux_loss.detach().double() * aux_loss_scale for output in outputs]).sum(),
        [torch.stack([stats.tokens_per_expert for stats in calls]).sum(0) for calls in layers],
        [torch.stack([stats.router_entropy for stats in calls]).mean() for calls in layers],
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None},
    )


@functools.cache
def step_of_one_process(config: DecoderConfig, num_micro_batches: int = NUM_MICRO_BATCHES) -> Step:
    return step_of(decoder(config), micro_batches(*batch(), count=num_micro_batches))


def part_of_micro_batches(whole: Tensor, mesh: Mesh, rules: str, count: int = NUM_MICRO_BATCHES) -> Tensor:
    """Concatenate this rank's parts of the micro-batches: the batch that the rank passes to a step."""
    sharding = token_sharding(mesh, rules)
    return torch.cat([part[sharding.slices(part.shape)] for part in whole.tensor_split(count)])


def staged(
    config: DecoderConfig,
    mesh: Mesh,
    rules: str,
    schedule: str,
    *,
    dispatch: Any = "auto",
    recompute: Collection[str] | None = None,
    model: Decoder | None = None,
    **options: Any,
) -> Pipeline:
    return pipeline(
        decoder(config) if model is None else model,
        mesh,
        rules,
        loss=loss,
        schedule=schedule,
        num_micro_batches=options.pop("num_micro_batches", NUM_MICRO_BATCHES),
        dispatch=dispatch,
        recompute=recompute,
        **options,
    )


def check_step(found: PipelineOutput, run: Pipeline, expected: Step, times: int = 1) -> None:
    """Compare the results and gradients of a step with one process's; gradients are `times` as large."""
    assert_same(found.loss, expected.loss.double(), "loss")
    assert_same(found.aux_loss, expected.aux_loss, "aux_loss")
    assert len(found.stats) == len(expected.tokens_per_expert)
    for stats, counts, entropy in zip(
        found.stats.values(), expected.tokens_per_expert, expected.router_entropy, strict=True
    ):
        assert stats.tokens_per_expert.equal(counts)
        assert_same(stats.router_entropy, entropy.double(), "router_entropy")
    check_gradients(run, expected.gradients, times)


def check_gradients(run: Pipeline, expected: dict[str, Tensor], times: int = 1) -> None:
    for name, parameter in run.named_parameters():
        if name not in expected:
            assert parameter.grad is None or not parameter.grad.full_tensor().any(), name  # type: ignore[attr-defined]
            continue
        assert parameter.grad is not None, name
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert_same(gradient, times * expected[name], name)
