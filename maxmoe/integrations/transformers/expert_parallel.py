"""Expert parallelism of models of transformers, with the dispatch of maxmoe: implementations to choose by name.

config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="maxmoe_ragged_all_to_all")
model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from maxmoe.config import MoEConfig
from maxmoe.dispatch import ExpertRanks, RaggedAllToAll, RingOfExperts
from maxmoe.integrations.transformers.experts import compute_experts
from maxmoe.nn import Assignment, Dispatcher, LocalDispatcher, LocalExperts, run_experts
from maxmoe.ops import RaggedPlan


def register() -> None:
    """Add "maxmoe_ring_of_experts" and "maxmoe_ragged_all_to_all" to the implementations of expert parallelism."""
    EPImplementationInterface.register("maxmoe_ring_of_experts", RingOfExpertsEP)
    EPImplementationInterface.register("maxmoe_ragged_all_to_all", RaggedAllToAllEP)


class _DispatcherEP(EPImplementation):
    """Brings tokens to the experts of other ranks with a `Dispatcher`; `maxmoe.ops` compute them.

    Args:
        experts: of this rank.
        ep_mesh: of the ranks that share the experts.
        tp_mesh: of the ranks that hold the same tokens: this one alone.

    Raises:
        ValueError: if other ranks hold the same tokens.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(f"{type(self).__name__} needs other tokens on every rank: tp_size=1, got {tp_mesh.size()}")
        self.experts = experts
        count, num_ranks = experts.num_experts, ep_mesh.size()
        local_experts = LocalExperts(ep_mesh.get_local_rank() * count, count, num_ranks * count)
        # The dispatchers read from the config that weights multiply outputs, and that no buffer is bounded; the weights
        # come from the router of transformers.
        hidden_size = experts.config.get_text_config().hidden_size
        config = MoEConfig(
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_experts=local_experts.total,
            top_k=1,
            normalization="none",
        )
        self.dispatcher = self._dispatcher(LocalDispatcher(config, local_experts), local_experts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of all ranks for the tokens of this one.

        Args:
            hidden_states: ``(T, D)``, floating.
            top_k_index: ``(T, K)``, int64, in [0, num_experts of all ranks).
            top_k_weights: ``(T, K)``, floating.

        Returns:
            ``(T, D)``, dtype of hidden_states.
        """

        def compute(x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
            assert weights is not None
            return compute_experts(self.experts, x, weights, plan)

        assignment = Assignment(top_k_weights, top_k_index, is_complete=True)
        combined, _ = run_experts(self.dispatcher, compute, hidden_states, assignment, num_sequences=1)
        return combined

    def _dispatcher(self, local: Dispatcher, experts: LocalExperts) -> Dispatcher:
        raise NotImplementedError


class RingOfExpertsEP(_DispatcherEP):
    """Every rank gets all tokens, computes those of its experts, and the partial sums are reduce-scattered."""

    def _dispatcher(self, local: Dispatcher, experts: LocalExperts) -> Dispatcher:
        return RingOfExperts(local, self.ep_mesh.get_group())


class RaggedAllToAllEP(_DispatcherEP):
    """Every routed row goes to the rank of its expert, and its weighted output comes back."""

    def _dispatcher(self, local: Dispatcher, experts: LocalExperts) -> Dispatcher:
        first_experts = tuple(range(0, experts.total, experts.count))
        return RaggedAllToAll(local, ExpertRanks(self.ep_mesh.get_group(), experts, first_experts))
