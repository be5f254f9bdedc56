"""Expert parallelism of models of transformers with the dispatch strategies of maxmoe.

config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="maxmoe_ragged_all_to_all")
model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)
"""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from maxmoe.integrations.transformers.experts import experts_forward
from maxmoe.nn import Dispatcher, ExpertRunner, ForeignExperts, LocalDispatcher, LocalExperts, TopK
from maxmoe.ops import RaggedPlan
from maxmoe.parallel.dispatch import ExpertRanks, LeastLoaded, RaggedAllToAll, RingOfExperts


def register() -> None:
    """Register the strategies of maxmoe as implementations of expert parallelism."""
    EPImplementationInterface.register("maxmoe_ring_of_experts", RingOfExpertsEP)
    EPImplementationInterface.register("maxmoe_ragged_all_to_all", RaggedAllToAllEP)
    EPImplementationInterface.register("maxmoe_least_loaded", LeastLoadedEP)


class _DispatcherEP(EPImplementation):
    """Dispatches tokens to the experts of the ranks of `ep_mesh`, which the operators of maxmoe compute."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(f"{type(self).__name__} needs other tokens on every rank: tp_size=1, got {tp_mesh.size()}")
        self.experts = experts
        count, num_ranks = experts.num_experts, ep_mesh.size()
        local_experts = LocalExperts(ep_mesh.get_local_rank() * count, count, num_ranks * count, num_ranks * count)
        ranks = ExpertRanks(ep_mesh.get_group(), local_experts, tuple(range(0, local_experts.total, count)))
        self.runner = ExpertRunner(self._dispatcher(LocalDispatcher(local_experts), ranks))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the output ``(T, D)`` of this rank's tokens; `top_k_index` ``(T, K)`` are experts of all ranks."""

        def compute(
            x: Tensor, weights: Tensor | None, plan: RaggedPlan, foreign: ForeignExperts | None = None
        ) -> Tensor:
            return experts_forward(self.experts, x, plan, weights, foreign)

        top_k = TopK(top_k_weights, top_k_index, is_unpadded=True)
        combined, _ = self.runner.run(compute, hidden_states, top_k)
        return combined

    @abstractmethod
    def _dispatcher(self, local: LocalDispatcher, ranks: ExpertRanks) -> Dispatcher[Any, Any]: ...


class RingOfExpertsEP(_DispatcherEP):
    """All-gathers the tokens, computes the local experts, and reduce-scatters the partial sums."""

    def _dispatcher(self, local: LocalDispatcher, ranks: ExpertRanks) -> Dispatcher[Any, Any]:
        return RingOfExperts(local, ranks)


class RaggedAllToAllEP(_DispatcherEP):
    """Sends every routed row to the rank of its expert, and the weighted output back."""

    def _dispatcher(self, local: LocalDispatcher, ranks: ExpertRanks) -> Dispatcher[Any, Any]:
        return RaggedAllToAll(local, ranks)


class LeastLoadedEP(RaggedAllToAllEP):
    """As `RaggedAllToAllEP`, but ranks with few rows receive rows and weights of other ranks' experts."""

    def _dispatcher(self, local: LocalDispatcher, ranks: ExpertRanks) -> Dispatcher[Any, Any]:
        return LeastLoaded(local, ranks)
