"""Few combinations of several options in which any choice of one meets any choice of any other."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import TypeVar

Choice = TypeVar("Choice")


def pairwise(options: Sequence[Sequence[Choice]]) -> list[tuple[Choice, ...]]:
    """Return combinations of one choice of each option in which every pair of choices occurs."""
    combined = []
    numbered = [[(number, choice) for choice in range(len(choices))] for number, choices in enumerate(options)]
    missing = {pair for one, other in combinations(numbered, 2) for pair in product(one, other)}
    while missing:
        chosen = dict(min(missing))
        for number, choices in enumerate(numbered):
            if number not in chosen:
                new = [sum(tuple(sorted((c, o))) in missing for o in chosen.items()) for c in choices]
                chosen[number] = new.index(max(new))
        missing -= set(combinations(sorted(chosen.items()), 2))
        combined.append(tuple(options[number][choice] for number, choice in sorted(chosen.items())))
    return combined
