"""The partition of blocks into stages: the most even one, in parameters and in work."""

import itertools
from random import Random

import pytest

from maxmoe import presets
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.pipelining.stage_modules import partition_blocks, stage_parts


def largest(costs: list[tuple[float, float]], counts: list[int]) -> float:
    """The largest share of a stage, by definition."""
    ends = list(itertools.accumulate(counts))
    shares = []
    for stage, end in enumerate(ends):
        here = costs[1 + end - counts[stage] : 1 + end]
        here += costs[:1] if stage == 0 else []
        here += costs[-1:] if stage == len(ends) - 1 else []
        shares.append(max(map(sum, zip(*here, strict=True))))
    return max(shares)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_more_even(seed: int) -> None:
    random = Random(seed)
    num_blocks = random.randint(1, 9)
    num_stages = random.randint(1, num_blocks)
    costs = [(random.random(), random.random()) for _ in range(num_blocks + 2)]
    found = partition_blocks(costs, num_stages)
    assert len(found) == num_stages and sum(found) == num_blocks and min(found) >= 1
    cuts = itertools.combinations(range(1, num_blocks), num_stages - 1)
    every = [[b - a for a, b in itertools.pairwise([0, *cut, num_blocks])] for cut in cuts]
    assert largest(costs, found) == pytest.approx(min(largest(costs, counts) for counts in every))


def test_a_published_model() -> None:
    """DeepSeek-V3: blocks of equal work, and an output projection with the work of more than one."""
    moe = presets.deepseek_v3()
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_heads": 128, "num_dense_layers": 3}
    config = DecoderConfig(vocab_size=129280, num_layers=61, moe=moe, max_sequence_length=4096, **sizes)
    counts = [len(part.blocks) for part in stage_parts(Decoder(config, device="meta"), 16)]
    assert sum(counts) == 61 and set(counts[:-1]) == {3, 4} and counts[-1] == 2
