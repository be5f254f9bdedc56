"""Frozen experts of transformers, with adapters of PEFT beside gate, up and down, or without."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.alternatives.transformers_experts import GRADIENT_COPIES, TransformersExperts
from benchmarks.contender import Mode
from benchmarks.problem import Problem

RANK = 8


class FrozenExperts(TransformersExperts):
    """Frozen experts, computed by maxmoe."""

    kind = "part"

    def __init__(self) -> None:
        self.implementation = "maxmoe"
        self.name = "maxmoe, frozen experts"
        self.gradient_copies = 0

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        import maxmoe.integrations.transformers  # noqa: F401  # registers "maxmoe"

        super().prepare(problem)
        self.leaves = {name: self.leaves[name] for name in ("x", "weights")}
        self.module.requires_grad_(False)


class PeftExperts(TransformersExperts):
    """Adapters of rank 8 beside both parameters of the experts, through `peft.get_peft_model`.

    Args:
        implementation: "maxmoe", which gets the factors of the adapters, or "grouped_mm" or "eager", for which PEFT
            adds the product of the factors to the weights in every step.
    """

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.kind = "maxmoe" if implementation == "maxmoe" else "alternative"
        self.name = f"PEFT, {implementation}"
        # The sum of weights and adapters, and its gradient.
        self.gradient_copies = 2 * GRADIENT_COPIES.get(implementation, 0)

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """See `Contender`."""
        return None if importlib.util.find_spec("peft") else "peft is not installed"

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        from peft import LoraConfig, get_peft_model

        import maxmoe.integrations.transformers  # noqa: F401  # registers "maxmoe"

        super().prepare(problem)
        self.leaves = {name: self.leaves[name] for name in ("x", "weights")}
        names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
        adapters = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_parameters=names, target_modules=[], init_lora_weights=False
        )
        torch.manual_seed(0)
        self.model = get_peft_model(_Block(self.module), adapters)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # A large product of the factors would hide the weights in the comparison of the results.
        for parameter in trained.values():
            parameter.data.mul_(0.1)
        self.leaves |= trained

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        output: Tensor = self.model(self.leaves["x"], self.experts, self.leaves["weights"])
        return output

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """All contenders have the same leaves."""
        return dict(zip(self.leaves, gradients, strict=True))


class _Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = self.experts(x, experts, weights)
        return output


def adapter_contenders() -> list[TransformersExperts]:
    """Return a new object of each contender, adapters through maxmoe first."""
    return [PeftExperts("maxmoe"), FrozenExperts(), PeftExperts("grouped_mm"), PeftExperts("eager")]
