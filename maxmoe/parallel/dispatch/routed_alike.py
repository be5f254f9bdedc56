"""Check that ranks which hold the same tokens have routed them alike."""

import torch
from torch import Tensor

from maxmoe._torch import assert_async
from maxmoe.ranks.checksum import PRIME


def checksum_of_ids(experts: Tensor) -> Tensor:
    """Return a checksum ``()`` of expert ids, int64, which float32 represents exactly."""
    ids = experts.flatten()
    return (ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum().remainder(PRIME)


def check_routed_alike(of_ranks: Tensor) -> None:
    """Raise unless all rows of `of_ranks` ``(P, n)``, what each rank has routed, are equal.

    On an accelerator, for which the host does not wait, an assertion of the device raises.
    """
    is_other = of_ranks.ne(of_ranks[0]).any(1)
    if of_ranks.device.type != "cpu":
        assert_async(~is_other.any(), "ranks that hold the same tokens must route them alike")
    elif is_other.any():
        raise RuntimeError(
            "ranks that hold the same tokens must route them alike, got other experts on the ranks "
            f"{is_other.nonzero()[:, 0].tolist()} of the group than on its rank 0: give them the same tokens and seeds"
        )
