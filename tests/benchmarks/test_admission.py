"""Which contenders are timed: shared weights, too little memory, wrong results."""

import gc

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import admission, machine, shapes
from benchmarks.admission import Admission, combinations
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts, MaxmoeLinearLayout
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.contender import Contender, disagreement
from benchmarks.problem import Problem, make_problem

SHAPE = shapes.Shape(num_tokens=7, hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)


@pytest.fixture
def problem() -> Problem:
    torch.set_num_threads(1)
    return make_problem(SHAPE, torch.float32)


def pretend_free(monkeypatch: pytest.MonkeyPatch, problem: Problem, copies: float) -> None:
    """Pretend that memory for a call and for a number of copies of the weights is available."""
    working = admission.TENSORS_OF_ROWS * SHAPE.num_rows * (SHAPE.hidden_size + 2 * SHAPE.intermediate_size) * 4
    free = (working + copies * problem.weight_bytes) / admission.USABLE
    monkeypatch.setattr(machine, "available_memory", lambda: free)


def test_contenders_of_the_same_layout_share_memory(problem: Problem) -> None:
    everybody: list[Contender] = [MaxmoeExperts(), MaxmoeLinearLayout()]
    everybody += [TransformersExperts("grouped_mm"), TransformersExperts("eager")]
    for contender in everybody:
        contender.prepare(problem)
    ours, *linear = [{each.data_ptr() for each in contender.parameters()} for contender in everybody]
    assert ours == {problem.gate.data_ptr(), problem.up.data_ptr(), problem.down.data_ptr()}
    assert linear[0] == linear[1] == linear[2]
    del contender, everybody
    gc.collect()
    assert not problem.copies


def test_what_does_not_fit_says_so(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_free(monkeypatch, problem, 0.5)
    runners, reasons = Admission(problem, "forward", 1e-5).runners([MaxmoeExperts(), TorchGroupedMM()])
    assert [each.name for each in runners] == ["maxmoe"]
    assert reasons["torch grouped_mm"].startswith("does not fit into memory: needs about 0.0 GiB")
    # The gradients take the memory of the weights once more, the gradients of eager twice.
    assert set(Admission(problem, "forward+backward", 1e-5).runners([MaxmoeExperts()])[1]) == {"maxmoe"}
    pretend_free(monkeypatch, problem, 2.5)
    both = [TransformersExperts("grouped_mm"), TransformersExperts("eager")]
    assert set(Admission(problem, "forward+backward", 1e-5).runners(both)[1]) == {"transformers eager"}


def test_combinations_show_an_error_of_its_size() -> None:
    generator = torch.Generator().manual_seed(3)
    right, noise = (torch.randn(4, 64, 32, generator=generator) for _ in range(2))
    wrong = right + 1e-2 * noise
    theirs, ours = (combinations({"gate": each, "output": right[0]}) for each in (wrong, right))
    assert theirs["gate"].shape == (4, 64, admission.NUM_COMBINATIONS)
    assert disagreement(theirs, ours, 2e-2) is None
    assert disagreement(theirs, ours, 5e-3) is not None
    one_number = right.clone()
    one_number[2, 5, 7] += 1
    assert disagreement(combinations({"gate": one_number}), combinations({"gate": right}), 1e-3) is not None
