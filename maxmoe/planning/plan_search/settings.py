"""What a search tries: chunks, parts to recompute, strategies."""

from torch import nn

from maxmoe.nn import check_recompute
from maxmoe.parallel.plan.dispatch_plan import Dispatch

CHUNKS = (1, 2, 4)
# With balanced routing, "least_loaded" is "ragged_all_to_all".
STRATEGIES: tuple[Dispatch, ...] = ("ragged_all_to_all", "ring_of_experts", "gather_weights")
# Each recomputes the parts of the one before it, so that it needs more time.
RECOMPUTE: tuple[tuple[str, ...], ...] = (
    (),
    ("experts",),
    ("attention", "experts"),
    ("attention", "experts", "feed_forward", "norms", "shared_experts"),
    ("blocks",),
)


def recomputations(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of `RECOMPUTE` that parts of a model have, from the fastest to the one that keeps least."""
    known = {name for module in model.modules() for name in getattr(module, "recompute_names", ())}
    chosen = dict.fromkeys(tuple(name for name in names if name in known) for names in RECOMPUTE)
    for names in chosen:
        check_recompute(model, names)
    return list(chosen)
