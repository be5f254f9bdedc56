"""Which contenders are timed: shared weights, too little memory, wrong results."""

import gc
from typing import ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import admission, machine, shapes
from benchmarks.admission import Admission, combinations
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts, MaxmoeLinearLayout
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.contender import Contender, disagreement
from benchmarks.problem import Problem, make_problem
from benchmarks.timing import round_robin

SHAPE = shapes.Shape(num_tokens=7, hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)


class Holding(MaxmoeExperts):
    """Counts the objects that hold a copy of the weights."""

    kind, weight_copies = "alternative", 1
    alive: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def prepare(self, problem: Problem) -> None:
        super().prepare(problem)
        self.alive.append(self.name)
        self.is_prepared = True

    def __del__(self) -> None:
        if hasattr(self, "is_prepared"):
            self.alive.remove(self.name)

    def forward(self) -> Tensor:
        self.alive_at_call = list(self.alive)
        return super().forward()


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


@pytest.mark.parametrize(("copies", "together"), [(2.1, True), (1.1, False)])
def test_what_does_not_fit_together_is_prepared_by_turns(
    copies: float, together: bool, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_free(monkeypatch, problem, copies)
    alive: list[list[str]] = []
    monkeypatch.setattr(Holding, "forward", lambda self: alive.append(list(self.alive)) or MaxmoeExperts.forward(self))
    runners, reasons = Admission(problem, "forward", 1e-5).runners([Holding("a"), Holding("b")])
    assert reasons == {}
    assert alive == [["a"], ["a", "b"] if together else ["b"]]
    alive.clear()
    list(round_robin(runners, 2))
    # If both do not fit at once, the first call of each turn is not timed, because its memory is new.
    timed = sum(len(each.seconds) for each in runners)
    assert len(alive) == timed + (0 if together else 2 * 2)
    assert [len(each.seconds) > 1 for each in runners] == [True, True]
    assert all(each == ["a", "b"] for each in alive) if together else {*map(tuple, alive)} == {("a",), ("b",)}
    assert Holding.alive == (["a", "b"] if together else [])
    runners.clear()
    assert Holding.alive == []


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
