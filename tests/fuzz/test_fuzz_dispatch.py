"""A short run of `fuzz_dispatch.py`; the command line runs it for any time."""

from random import Random

import pytest

from fuzz import fuzz_dispatch
from fuzz.loop import fuzz
from maxmoe.sharding import Mesh

# Warnings of settings that train no router, which the fuzzer draws too.
pytestmark = pytest.mark.filterwarnings("ignore:top_k=1 with normalization:UserWarning")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_steps_on_meshes_are_those_of_one_process() -> None:
    outcomes = fuzz(fuzz_dispatch.one_case, seed=0, cases=range(8), seconds=600)
    assert sum(outcomes.values()) > 0


def test_everything_is_drawn() -> None:
    random, drawn = Random(0), set()
    for number in range(300):
        name = random.choice(list(fuzz_dispatch.RULES))
        sizes = fuzz_dispatch.draw_mesh(random, fuzz_dispatch.RULES[name])
        drawn |= {name, *sizes}
        if number % 5:  # one mesh in 26 has `tensor`, and a step takes far longer to draw than a mesh
            continue
        step = fuzz_dispatch.draw_step(random, Mesh.planned(sizes), fuzz_dispatch.RULES[name])
        drawn |= {step.checkpointing, step.options["dispatch"], f"{step.options['num_chunks']} chunks"}
        drawn |= {step.batch.x.dtype, "other numbers of sequences" if step.sizes else "equal numbers of sequences"}
    expected = {*fuzz_dispatch.RULES, *fuzz_dispatch.AXES, *fuzz_dispatch.DTYPES, "no", "all", "keep_routing"}
    expected |= {"ring_of_experts", "ragged_all_to_all", "least_loaded", "auto", "gather_weights", "1 chunks"}
    expected |= {"7 chunks"}
    expected |= {"other numbers of sequences", "equal numbers of sequences"}
    assert drawn >= expected, expected - drawn
