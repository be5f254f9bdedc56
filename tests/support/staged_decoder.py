"""Models in pipeline stages, and the step of one process that accumulates over micro-batches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.pipelining  # once, in the process that forks, and not in every rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe import MoEConfig, presets
from maxmoe._torch import tree_map
from maxmoe.adapters import packed_as_by_peft
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.parallel import token_sharding
from maxmoe.pipelining import Pipeline, PipelineOutput, pipeline
from maxmoe.sharding import Mesh
from support import parallel_decoder
from support.parallel_decoder import batch, decoder
from support.parts import assert_same

NUM_MICRO_BATCHES = 2
FOUR: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 4}
EIGHT = FOUR | {"num_experts": 8}
GROUPS = {"top_k": 3, "num_groups": 4, "top_k_groups": 2, "correction_bias_update_rate": 0.01}
MOE: dict[str, MoEConfig] = {
    "mixtral": presets.mixtral(**FOUR, load_balance_loss_weight=0.1),
    "deepseek_v3": presets.deepseek_v3(**EIGHT, **GROUPS, load_balance_loss_weight=0.1),
    "gpt_oss": presets.gpt_oss(**FOUR, top_k=2, load_balance_loss_weight=0.1),
    "hash": presets.mixtral(**FOUR, router=HashRouting(num_ids=32)),
    "pools": presets.mixtral(**EIGHT, router=DocumentPools(min_size=3, max_size=3)),
}


def config(family: str, **changes: Any) -> DecoderConfig:
    options: dict[str, Any] = {"num_layers": 4, "moe": MOE[family], **changes}
    return replace(parallel_decoder.CONFIG, **options)


DEEPSEEK = config("deepseek_v3")
TWO_BLOCKS = config("deepseek_v3", num_layers=2)  # one for each of two stages, without and with experts
SPLIT = "interleaved_zero_bubble"  # a schedule with a split backward


def loss(output: DecoderOutput, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


@dataclass(frozen=True)
class Step:
    """Results of one process; a decoder's have an auxiliary loss, and counts and entropy of each layer."""

    loss: Tensor
    gradients: dict[str, Tensor]
    aux_loss: Tensor | None = None
    layers: tuple[tuple[Tensor, Tensor], ...] = ()


def step_of(
    model: nn.Module,
    inputs: Tensor,
    targets: Any,
    *,
    count: int = NUM_MICRO_BATCHES,
    aux_loss_scale: float = 1.0,
    loss: Any = loss,
    **options: Any,
) -> Step:
    """Accumulate gradients over micro-batches, without dividing them."""
    outputs, losses = [], []
    for number in range(count):
        part, target, arguments = cut((inputs, targets, options), lambda x, n=number: x.tensor_split(count)[n])
        outputs.append(model(part, **arguments))
        losses.append(loss(outputs[-1], target))
        (losses[-1] + (aux_loss_scale * outputs[-1].aux_loss if isinstance(model, Decoder) else 0)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    total = torch.stack(losses).sum().detach().double()
    if not isinstance(model, Decoder):
        return Step(total, gradients)
    layers = (
        (
            torch.stack([stats.tokens_per_expert for stats in calls]).sum(0),
            torch.stack([stats.router_entropy for stats in calls]).mean().double(),
        )
        for calls in zip(*(output.stats for output in outputs), strict=True)
    )
    aux_loss = aux_loss_scale * torch.stack([output.aux_loss.detach().double() for output in outputs]).sum()
    return Step(total, gradients, aux_loss, tuple(layers))


@functools.cache
def step_of_one_process(config: DecoderConfig, num_micro_batches: int = NUM_MICRO_BATCHES) -> Step:
    return step_of(decoder(config), *batch(), count=num_micro_batches)


def cut(values: Any, part: Callable[[Tensor], Tensor]) -> Any:
    """Take a part of each tensor."""
    return tree_map(lambda value: part(value) if isinstance(value, Tensor) else value, values)


def part_of_micro_batches(values: Any, mesh: Mesh, rules: str = "default", count: int = NUM_MICRO_BATCHES) -> Any:
    """Concatenate this rank's parts of the micro-batches of each tensor: the batch that the rank passes to a step."""
    sharding = token_sharding(mesh, rules)

    def part(whole: Tensor) -> Tensor:
        parts = whole.tensor_split(count)
        return torch.cat([each[(*sharding.slices(each.shape[:2]), ...)] for each in parts])

    return cut(values, part)


def staged(
    model: DecoderConfig | nn.Module, mesh: Mesh, rules: str = "default", schedule: str = "1f1b", **options: Any
) -> Pipeline:
    """Cut a model, or a new decoder with this config."""
    model = decoder(model) if isinstance(model, DecoderConfig) else model
    options = {"loss": loss, "num_micro_batches": NUM_MICRO_BATCHES, **options}
    return pipeline(model, mesh, rules, schedule=schedule, **options)


def check_step(found: PipelineOutput, run: Pipeline, expected: Step, times: int = 1) -> None:
    """Compare the results and gradients of a step with one process's; gradients are `times` as large."""
    check_output(found, expected)
    check_gradients(run, expected.gradients, times)


def check_output(found: PipelineOutput, expected: Step) -> None:
    assert_same(found.loss, expected.loss, "loss")
    if expected.aux_loss is None:
        return
    assert_same(found.aux_loss, expected.aux_loss, "aux_loss")
    for stats, (counts, entropy) in zip(found.stats.values(), expected.layers, strict=True):
        assert stats.tokens_per_expert.equal(counts)
        assert_same(stats.router_entropy, entropy, "router_entropy")


def check_gradients(run: Pipeline, expected: dict[str, Tensor], times: int = 1) -> None:
    for name, parameter in run.named_parameters():
        if name not in expected:
            assert parameter.grad is None or not whole(parameter.grad).any(), name
            continue
        assert parameter.grad is not None, name
        gradient = whole(parameter.grad)
        gradient = packed_as_by_peft(name, gradient) if "lora_" in name else gradient
        assert_same(gradient, times * expected[name], name)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
