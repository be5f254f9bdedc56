"""Router and routed experts of a layer in one operator, in less time for few tokens than in their modules."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from maxmoe import _C
from maxmoe._torch import buffer_table, child_table, entries_of_hooks, parameter_table
from maxmoe.config import MoEConfig
from maxmoe.nn.dispatcher import ExpertRunner
from maxmoe.nn.experts import Experts
from maxmoe.nn.local_dispatcher import LocalDispatcher, LocalExperts
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import Router
from maxmoe.nn.routing import Routing

if TYPE_CHECKING:
    from maxmoe.nn.moe import MoE


class OneOperator:
    """The operator that computes what the router and the experts of a layer would compute.

    A layer keeps it until its config, its runner or one of the two modules is replaced.
    """

    def __init__(self, config: MoEConfig, runner: ExpertRunner, router: Router, experts: Experts) -> None:
        self._parts = config, runner, router, experts
        self.has_others = config.num_shared_experts > 0 or config.has_zero_computation_outputs
        # The operator makes one plan for experts that are all in this process and get the tokens themselves.
        in_process = runner == _runner_of_one_process(config.num_experts) and not config.maps_rows
        self._fits_layer = in_process and router.is_plain and experts.is_plain
        if not self._fits_layer:
            return
        # Quantized matrices are modules.
        others = ((child_table(experts), name) for name in (*experts.expert_matrices(), "norm"))
        self._others = (*entries_of_hooks(router, experts), *others)
        # An attribute of a module takes ten times the time of a table.
        self._tables = parameter_table(router), buffer_table(router), parameter_table(experts)
        self._routed_experts = _C.RoutedExperts(
            config.hidden_size,
            config.top_k,
            config.score_function,
            config.num_groups,
            config.top_k_groups,
            router.rule.group_score,
            config.normalization,
            config.routed_scaling_factor,
            *experts.activation_arguments.values(),
        )

    @classmethod
    def of(cls, layer: MoE) -> OneOperator | None:
        """Return the operator of a layer whose modules would now run their own forward and nothing else."""
        children = child_table(layer)
        router, experts = children.get("router"), children.get("experts")
        if type(router) is not Router or type(experts) is not Experts:
            return None
        kept = layer.one_operator
        if kept is None or kept._parts != (layer.config, layer.runner, router, experts):
            kept = layer.one_operator = cls(layer.config, layer.runner, router, experts)
        return kept if kept._fits_layer and _C.are_false(kept._others) else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Routing, Tensor] | None:
        """Return the outputs ``(..., D)`` for tokens x, their routing, and the number ``()`` of dropped slots.

        None for tokens of another size or dtype than the experts have.
        """
        experts = self._parts[3]
        try:
            routed = self._routed_experts(x, *self._tables, "experts" in experts.recompute)
        except ValueError as error:
            part = experts if str(error).startswith("maxmoe::expert_ffn") else self._parts[2]
            raise ValueError(f"{module_path(part)}: {error}") from error
        if routed is None:
            return None
        out, logits, weights, ids, probabilities, load, dropped = routed
        return out, Routing(logits, probabilities, weights, ids, tokens_per_expert=load), dropped


@functools.cache
def _runner_of_one_process(num_experts: int) -> ExpertRunner:
    """Return the runner that makes a plan with a row for each slot, and does nothing else."""
    return ExpertRunner(LocalDispatcher(LocalExperts(0, num_experts, num_experts, num_experts)))
