"""Interface of the dispatch strategies: each makes a dispatcher."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from maxmoe.nn.dispatcher import Dispatched, Dispatcher
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.recompute.freed_storage import Recomputation

S = TypeVar("S")

# Names of what strategies communicate.
TOKENS, WEIGHTS, OUTPUTS = "tokens to experts", "routing weights", "outputs of experts"


class Strategy:
    """Base of the ways to dispatch tokens between ranks. CONTRIBUTING.md lists what a new strategy needs.

    Attributes:
        keeps_sequences: whether the rank of an expert gets whole sequences, which `capacity_factor` needs.
    """

    keeps_sequences: ClassVar[bool] = False

    def __deepcopy__(self, _memo: object) -> "Strategy":
        """Return the object itself: a process group cannot be copied, so copies of a layer share it."""
        return self

    @classmethod
    def check(cls, layout: ExpertLayout) -> None:
        """Raise ValueError for a configuration or mesh axes that the strategy cannot run with."""

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        raise NotImplementedError


class LocalStrategy(Strategy):
    """The strategy without communication: each rank computes its experts for its own tokens."""

    keeps_sequences = True

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        return layout.local_dispatcher()


@dataclass(frozen=True, kw_only=True)
class Received(Dispatched, Generic[S]):
    """The input of this rank's experts that other ranks have sent, with what `combine` needs to send the outputs back.

    Attributes:
        local: input of the local experts, from the local dispatcher.
        sent: counts of what each rank has sent, of a type of the strategy's own.
        foreign: experts of other ranks that this rank computes as well; `plan` has the rows of its own ones.
    """

    local: Dispatched
    sent: S
    foreign: LentExperts | None = None

    @classmethod
    def of(cls, local: Dispatched, again: Recomputation, dropped: Tensor, sent: S) -> "Received[S]":
        """Add to the result of the local dispatcher what has come before it; `again` sends its input again."""
        return cls(
            x=local.x,
            weights=local.weights,
            plan=local.plan,
            dropped=dropped,
            recomputations=(again, *local.recomputations),
            local=local,
            sent=sent,
        )

    def compute(self, experts: Callable[..., Tensor]) -> Tensor:
        """Call `Experts` with this input, and with the foreign experts if there are any."""
        foreign = () if self.foreign is None else (self.foreign,)
        return experts(self.x, self.weights, self.plan, *foreign)
