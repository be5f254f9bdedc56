"""Evidence for the order of the columns of B in a file that has all experts in one tensor.

PEFT packs B with the expert as the fastest index. Some programs have written the columns of each expert one after the
other: the shapes are the same, and the products are of other experts. In a trained adapter, the columns of one expert
have similar norms, since they were trained by the same tokens: the variance within the experts is smaller in the right
order than in a wrong one. Differences between the ranks are removed first: rows of zeros up to a common rank, or copies
of one factor for all experts, follow each other too.
"""

import math
from typing import NamedTuple

from torch import Tensor

from maxmoe.convert.adapter_file import BY_EXPERT, PACKING, AdapterFile

# Standard deviations by which one order must explain the norms better than chance and better than the other one.
_DECISIVE = 6.0


class Packing(NamedTuple):
    """How well each order of the columns of B explains their norms, in standard deviations from chance."""

    expert_fastest: float
    by_expert: float
    marker: str | None  # that the config has

    @property
    def is_by_expert(self) -> bool:
        """Whether the columns of an expert are read one after the other: only if the config says so."""
        return self.marker == BY_EXPERT

    def check(self, where: str) -> None:
        """Raise if the norms say clearly that the columns have the other order, and the config says nothing."""
        fitting, other = self.expert_fastest, self.by_expert
        if self.marker is None and other > _DECISIVE and other - fitting > _DECISIVE:
            raise ValueError(
                f"{where}: the norms of the columns of B must fit their experts, got {fitting:.1f} standard deviations "
                f"above chance with the expert as fastest index, and {other:.1f} if the columns of an expert follow "
                f'each other: write "{PACKING}": "{BY_EXPERT}" into adapter_config.json if they do, or else '
                '"rank_major"'
            )


def packing_of(file: AdapterFile) -> Packing:
    """Measure both orders of the columns of B in a file with packed experts."""
    totals, count = [0.0, 0.0], 0
    for block, experts in file.experts.items():
        for name, module in file.parameters(block).items() if experts.kind == "packed" else ():
            rank, _ = file.rank_and_scale(f"{block}experts.{name}")
            norms = file.packed(module, rank).b.double().norm(dim=0)
            if norms.any():
                logarithms = norms.clamp(min=norms.max() * 1e-12).log().reshape(rank, -1)  # zeros without any tokens
                apart = logarithms - logarithms.mean(1, keepdim=True)
                for place, groups in enumerate((apart.T, apart.reshape(-1, rank))):
                    totals[place] += _deviations(groups)
                count += 1
    expert_fastest, by_expert = (total / math.sqrt(max(count, 1)) for total in totals)
    return Packing(expert_fastest, by_expert, file.config.get(PACKING))


def _deviations(groups: Tensor) -> float:
    """Return by how many standard deviations the share of the variance between groups (E, r) is above chance.

    For numbers in a random order, the share has a beta distribution with (E - 1) / 2 and (n - E) / 2, n = E r.
    """
    whole = groups - groups.mean()
    if groups.shape[1] == 1 or not whole.any():
        return 0.0
    share = float(groups.shape[1] * (groups.mean(1) - groups.mean()).square().sum() / whole.square().sum())
    alpha, beta = (len(groups) - 1) / 2, (groups.numel() - len(groups)) / 2
    mean = alpha / (alpha + beta)
    return (share - mean) / math.sqrt(max(mean * (1 - mean) / (alpha + beta + 1), 1e-30))
