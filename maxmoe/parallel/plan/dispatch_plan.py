"""Plan of the dispatch of a layer: the mesh axes over which its experts are sharded, and the strategy."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from maxmoe._torch import never_compiled
from maxmoe.declaration import EXPERT_TOKEN_DIMS
from maxmoe.nn import ExpertRunner, TensorParallelRegion
from maxmoe.parallel.dispatch import (
    ExpertLayout,
    LeastLoaded,
    LocalStrategy,
    PartialSums,
    RaggedAllToAll,
    RingOfExperts,
    Strategy,
)
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens, activation_spec
from maxmoe.sharding.rules import LogicalRules

Dispatch: TypeAlias = Literal["auto", "ring_of_experts", "ragged_all_to_all", "least_loaded", "gather_weights"]

STRATEGIES: dict[Dispatch, type[Strategy]] = {
    "ring_of_experts": RingOfExperts,
    "ragged_all_to_all": RaggedAllToAll,
    "least_loaded": LeastLoaded,
    "gather_weights": LocalStrategy,
}


class MeshExpertRunner(ExpertRunner):
    """An `ExpertRunner` that is not compiled: with most strategies, shapes depend on the rows that other ranks send."""

    run = never_compiled(ExpertRunner.run)


@dataclass(frozen=True, kw_only=True)
class DispatchPlan(ExpertLayout):
    """Plan of the dispatch of one layer.

    Args:
        strategy: dispatch strategy, given or chosen. Without `expert_axes`, all experts are computed on every rank.
        tensor_parallel_axes: mesh axes over which each expert is computed in parts.
        embed_axes: mesh axes that shard the residual stream to which the layer adds its output.
        shared_is_partial: whether the shared experts are computed in parts over the same axes as the routed experts.
    """

    strategy: Dispatch = "gather_weights"
    reason: str = "given"
    tensor_parallel_axes: tuple[str, ...] = ()
    embed_axes: tuple[str, ...] = ()
    shared_is_partial: bool = False

    @property
    def strategy_class(self) -> type[Strategy]:
        """The class of the strategy; local if all ranks of the experts hold the same tokens."""
        return STRATEGIES[self.strategy] if self.token_axes else LocalStrategy

    def num_chunks(self, asked_for: int) -> int:
        """Return the number of chunks of the tokens: one if there is no communication to overlap with the experts."""
        return 1 if self.strategy_class is LocalStrategy else asked_for

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes over which experts are sharded and all ranks hold the same tokens."""
        return tuple(axis for axis in self.expert_axes if axis not in self.token_axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the ranks compute parts of the layer for the same tokens."""
        parts = (*self.replicated_axes, *self.tensor_parallel_axes)
        return tuple(axis for axis in self.mesh.axes if axis in parts)

    def runner(self, num_chunks: int) -> ExpertRunner:
        """Make the runner of this process, with `num_chunks` chunks if there is communication to overlap."""
        region = self.partial_sums if self.partial_axes or self.embed_axes else TensorParallelRegion()
        return MeshExpertRunner(self.strategy_class.dispatcher(self), region, self.num_chunks(num_chunks))

    @property
    def partial_sums(self) -> PartialSums:
        """The parts of the layer that ranks compute for the same tokens."""
        return PartialSums(
            self.mesh,
            self.partial_axes,
            dropped_axes=self.replicated_axes if self.config.may_drop else (),
            embed_axes=self.embed_axes,
            shared_is_partial=self.shared_is_partial,
            routed_is_partial=not self.config.maps_rows,
        )


def plan_dispatch(
    local: DispatchPlan, stacked: ParameterSharding, rules: LogicalRules, tokens: ShardedTokens, dispatch: Dispatch
) -> DispatchPlan:
    """Plan the dispatch of a layer, given its plan without communication and the sharding of a stack of its experts.

    Experts are sharded over the axes that the rules `exp` and `activation_exp` share. If some of these axes also shard
    the tokens outside of the layer, tokens are communicated over them. Raises if an axis does not divide the number of
    experts, or if the experts of a rank would not be consecutive.
    """
    config = local.config
    if dispatch == "gather_weights":
        return local
    *_, of_activation = activation_spec(EXPERT_TOKEN_DIMS, local.mesh, rules)
    for drop in stacked.dropped:
        if drop.dim == 0 and drop.axis in of_activation:
            raise ValueError(
                f"num_experts must be divisible by the axes {of_activation} of the rule 'activation_exp': "
                f"{drop.reason}; dispatch='gather_weights' takes any number"
            )
    of_weights = stacked.sharding.spec[0]
    axes = tuple(axis for axis in of_weights if axis in of_activation)
    if axes != of_weights[: len(axes)]:
        raise ValueError(
            f"the rule 'exp' must have the axes of 'activation_exp' {axes} before all others, got {of_weights}: "
            "the experts of a rank would not be neighbours"
        )
    if config.num_experts % local.mesh.size(*axes):  # a stack in one dim with the rows of its matrices may be divisible
        raise ValueError(
            f"num_experts ({config.num_experts}) must be divisible by the axes {axes} of the rule 'activation_exp', "
            f"got {local.mesh.size(*axes)} ranks; dispatch='gather_weights' takes any number"
        )
    if not axes:
        return replace(local, reason="no axis of the mesh is one of 'activation_exp'")
    plan = replace(local, expert_axes=axes, token_axes=tuple(axis for axis in axes if axis in tokens.axes))
    strategy, reason = _chosen(plan)
    if dispatch != "auto":
        reason = "given" if dispatch == strategy else f"given; auto takes {strategy}: {reason}"
        strategy = dispatch
    plan = replace(plan, strategy=strategy, reason=reason)
    if config.capacity_factor is not None and not plan.strategy_class.keeps_sequences:
        able = [name for name, strategy_class in STRATEGIES.items() if strategy_class.keeps_sequences]
        raise ValueError(
            f"dispatch must be {' or '.join(map(repr, able))} with capacity_factor ({config.capacity_factor}), got "
            f"{strategy!r}, which sends rows without their sequences"
        )
    plan.strategy_class.check(plan)
    return plan


def _chosen(plan: DispatchPlan) -> tuple[Dispatch, str]:
    """Choose the strategy that sends fewer elements per rank: 2(P-1)TD in a ring, 2K(P-1)TD/P in a ragged all-to-all.

    If experts are sharded over replicated axes as well, a rank sends only the rows whose experts are in its group. With
    zero, copy and constant experts, K counts the experts of a token that compute a row if routing is balanced.
    """
    config, num_ranks = plan.config, plan.mesh.size(*plan.token_axes)
    if config.implementation == "dense":
        return "ring_of_experts", "the dense implementation computes every token that comes"
    if not plan.token_axes:
        return "ring_of_experts", "all ranks hold the same tokens: one all-reduce"
    rows, share = f"top_k ({config.top_k}) rows", config.num_experts / config.num_selectable_experts
    if share < 1:
        rows = f"{config.top_k * share:.3g} of {rows}"
    if config.top_k * share < plan.mesh.size(*plan.expert_axes):
        return "ragged_all_to_all", f"{rows} of a token are fewer bytes than {num_ranks} copies"
    return "ring_of_experts", f"{num_ranks} copies of a token are no more bytes than {rows}"
