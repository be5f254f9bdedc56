"""The contenders for the whole layer: router, experts, weighted sum."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import maxmoe
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.alternatives.transformers_experts import GRADIENT_COPIES
from benchmarks.contender import AutogradContender
from benchmarks.linear_layout import from_linear_layout, to_linear_layout
from benchmarks.problem import Problem


class MaxmoeLayer(AutogradContender):
    """`maxmoe.MoE`."""

    name = "maxmoe"
    kind = "maxmoe"
    weight_copies = 0

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        _, D, F, E, K = problem.shape
        config = maxmoe.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K)
        with torch.device("meta"):
            self.layer = maxmoe.MoE(config, dtype=problem.dtype)
        weights = {"router.weight": problem.router, "experts.gate_proj": problem.gate, "experts.up_proj": problem.up}
        self.layer.load_state_dict({**weights, "experts.down_proj": problem.down}, assign=True)
        self.set_leaves(problem, x=problem.x)
        self.leaves |= dict(self.layer.named_parameters())

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        hidden_states: Tensor = self.layer(self.leaves["x"]).hidden_states
        return hidden_states

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        return dict(zip(("x", "router", "gate", "up", "down"), gradients, strict=True))


class TransformersBlock(AutogradContender):
    """A block of transformers; its router computes in the dtype of x.

    Args:
        family: "Qwen3Moe" or "Mixtral".
        implementation: experts implementation, "grouped_mm" or "eager".
    """

    def __init__(self, family: str, implementation: str) -> None:
        self.family, self.implementation = family, implementation
        self.name = f"{family}SparseMoeBlock {implementation}"
        self.gradient_copies = GRADIENT_COPIES[implementation]

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.block = self._empty_block(problem)
        self.layout = to_linear_layout(problem)
        self.block.gate.weight = nn.Parameter(problem.router)
        self.block.experts.gate_up_proj = nn.Parameter(self.layout.gate_up)
        self.block.experts.down_proj = nn.Parameter(self.layout.down)
        self.set_leaves(problem, x=problem.x)
        parameters = dict(self.block.named_parameters())
        names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        self.leaves |= {name: parameters[name] for name in names}

    def _empty_block(self, problem: Problem) -> nn.Module:
        _, D, F, E, K = problem.shape
        sizes = {"hidden_size": D, "num_experts_per_tok": K}
        config: Qwen3MoeConfig | MixtralConfig
        with torch.device("meta"):
            if self.family == "Mixtral":
                config = MixtralConfig(**sizes, intermediate_size=F, num_local_experts=E)
                config._experts_implementation = self.implementation
                return MixtralSparseMoeBlock(config)
            config = Qwen3MoeConfig(**sizes, moe_intermediate_size=F, num_experts=E, norm_topk_prob=True)
            config._experts_implementation = self.implementation
            return Qwen3MoeSparseMoeBlock(config)

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        output: Tensor = self.block(self.leaves["x"].unsqueeze(0))
        return output.squeeze(0)

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, router, gate_up, down = gradients
        return {"x": x, "router": router, **from_linear_layout(gate_up, down)}


class ExpertsAlone(MaxmoeExperts):
    """The experts of the layer: `maxmoe.ops.ragged_plan` and `expert_ffn` with given routing."""

    name = "maxmoe, experts alone"
    kind = "part"


def layer_contenders() -> list[AutogradContender]:
    """Return a new object of each contender for the layer, maxmoe first."""
    blocks = [TransformersBlock(family, way) for family in ("Qwen3Moe", "Mixtral") for way in ("grouped_mm", "eager")]
    return [MaxmoeLayer(), *blocks]
