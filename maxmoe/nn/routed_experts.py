"""Router and routed experts of a layer in one operator, in less time for few tokens than in their modules."""

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
from maxmoe.nn.windows import BufferUse


class OneOperator:
    """The operator that computes what the router and the experts of a layer would compute.

    A layer keeps it until its config, its runner or one of the two modules is replaced.
    """

    def __init__(self, config: MoEConfig, runner: ExpertRunner, router: Router, experts: Experts) -> None:
        self.parts = config, runner, router, experts
        self.has_others = config.num_shared_experts > 0
        # The operator makes one plan, with a row for each slot, of experts in this process that get the tokens.
        every = LocalExperts(0, config.num_experts, config.num_experts, config.num_experts)
        in_process = runner == ExpertRunner(LocalDispatcher(every)) and not config.maps_rows
        self._is_plain = in_process and router.is_plain and experts.is_plain
        if not self._is_plain:
            return
        quantized = ((child_table(experts), name) for name in experts.expert_matrices())
        self._others = (*entries_of_hooks(router, experts), *quantized)
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

    def __call__(self, x: Tensor) -> tuple[Tensor, Routing, BufferUse] | None:
        """Return the outputs ``(..., D)`` for tokens x, their routing, and the number of dropped slots.

        None if the modules would now run more than their own forward, and for tokens of another size or dtype.
        """
        if not (self._is_plain and _C.are_false(self._others)):
            return None
        _, _, router, experts = self.parts
        try:
            routed = self._routed_experts(x, *self._tables, "experts" in experts.recompute)
        except ValueError as error:
            part = experts if str(error).startswith("maxmoe::expert_ffn") else router
            raise ValueError(f"{module_path(part)}: {error}") from error
        if routed is None:
            return None
        out, logits, weights, ids, probabilities, load, dropped = routed
        return out, Routing(logits, probabilities, weights, ids, tokens_per_expert=load), BufferUse(dropped)
