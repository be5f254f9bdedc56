"""A model is planned while other threads call or plan it: a plan works on a copy of the modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from maxmoe import quantize_experts
from maxmoe.parallel import parameter_shardings
from maxmoe.planning import estimate, explain, predict
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import batch, decoder
from support.threads import in_threads

MESH, STEP = Mesh.planned({"fsdp": 2, "expert": 2}), {"batch_size": 8, "sequence_length": 8}
TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def model() -> Any:
    """A decoder with quantized experts and adapters, whose parameters a plan replaces."""
    whole = decoder().float().requires_grad_(False)
    quantize_experts(whole, "int8")
    options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
    torch.manual_seed(3)
    return get_peft_model(whole, LoraConfig(r=3, **options))


def forwards(model: nn.Module) -> list[Tensor]:
    return [model(batch()[0]).logits.detach() for _ in range(30)]


PLANS: dict[str, Callable[[nn.Module], object]] = {
    "explain": lambda model: str(explain(model, MESH, "ep-as-dp")),
    "estimate": lambda model: str(estimate(model, MESH, "ep-as-dp", **STEP)),
    "shardings": lambda model: repr(parameter_shardings(model, MESH, LogicalRules.load("ep-as-dp"))),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_beside_forwards(plan: Callable[[nn.Module], object]) -> None:
    whole = model()
    expected, planned = forwards(whole), plan(whole)
    before = dict(whole.named_parameters())
    got, texts = in_threads(lambda: forwards(whole), lambda: {plan(whole) for _ in range(15)})
    assert all(map(torch.equal, got, expected)) and texts == {planned}
    assert all(parameter is before[name] for name, parameter in whole.named_parameters())


def test_predictions_of_two_threads() -> None:
    """Each thread predicts with another recomputation, which is a setting of the modules."""
    whole = decoder().float()

    def memory(recompute: tuple[str, ...]) -> int:
        return predict(whole, MESH, "ep-as-dp", "h100", recompute=recompute, **STEP).memory

    choices = [(), ("blocks",)]
    expected = [{memory(recompute)} for recompute in choices]
    assert expected[0] != expected[1]
    got = in_threads(*(lambda recompute=recompute: {memory(recompute) for _ in range(10)} for recompute in choices))
    assert got == expected and not any(block.is_recomputed for block in whole.blocks)
