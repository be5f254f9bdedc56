"""Steps of training on ranks against the steps of one process, for models, meshes and options of any kind."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.adapters import factor_names, packed_as_by_peft
from maxmoe.parallel import parallelize, parameter_shardings
from maxmoe.quantization import QuantizedWeight, dequantize_experts
from maxmoe.sharding import LogicalRules, Mesh
from support.moved_experts import moving_experts
from support.parallel_decoder import MeshRules, token_spec, values
from support.parts import assert_part, assert_same, part_by_definition
from support.run_ranks import run_cases


@dataclass(frozen=True)
class Results:
    """What a training returns beside gradients and parameters: of the tokens of this rank, and of all tokens."""

    of_tokens: dict[str, Tensor] = field(default_factory=dict)
    of_all: dict[str, Tensor] = field(default_factory=dict)


Part = Callable[[Tensor], Tensor]
Training = Callable[[Any, Part], Results]


@dataclass(frozen=True, eq=False)
class Case:
    """A model that ranks train as one process does, and the claim for which this row is there.

    Args:
        claim: what no other row would notice.
        layout: rules and mesh, with one rank for each of its places.
        model: makes the model, with the same values at every call. One process dequantizes it.
        train: called with the model, and a function that cuts this rank's part out of a tensor (batch, length, ...).
        rules: rules in the place of the preset.
        options: options of `parallelize`.
        slow: runs with `-m ""` alone.
    """

    claim: str
    layout: MeshRules
    model: Callable[[], nn.Module]
    train: Training
    rules: LogicalRules | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.claim} [{self.layout}]"


class Expected(NamedTuple):
    """Results of one process, gradients and trained parameters by name."""

    results: Results
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


made = functools.cache(functools.partial)  # the same function for the same arguments, so that its results are cached


@functools.cache
def of_one_process(make: Callable[[], nn.Module], train: Training) -> Expected:
    model = make()
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        dequantize_experts(model)
    results = train(model, lambda whole: whole)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Expected(results, gradients, values(model))


def check_case(case: Case, expected: Expected) -> None:
    mesh, rules = Mesh(case.layout.sizes), case.rules or LogicalRules.load(case.layout.rules)
    model = case.model()
    # The factors of PEFT are named and packed as by PEFT once they are no longer sharded.
    shardings = {} if factor_names(model) else parameter_shardings(model, mesh, rules, allow_unused=True)
    before = values(model)

    def check(name: str, found: Any, whole: Tensor, what: str) -> None:
        what, floor = f"{what} {name}", 1e-3
        if name in shardings:
            assert_part(found, whole, shardings[name].sharding, what, tolerance=case.tolerance, floor=floor)
            return
        assert isinstance(found, DTensor), what
        found = found.full_tensor()
        found = packed_as_by_peft(name, found) if "lora_" in name and found.shape != whole.shape else found
        assert_same(found, whole, what, scale=float(whole.abs().max()) + floor, tolerance=case.tolerance)

    parallelize(model, mesh, rules, allow_unused=True, **case.options)
    for name, parameter in model.named_parameters():
        check(name, parameter, before[name], "parameter")
    spec = token_spec(mesh, rules)
    with moving_experts(True) if case.options.get("dispatch") == "least_loaded" else nullcontext():
        results = case.train(model, lambda whole: part_by_definition(whole, spec, mesh))
    parts = {name: part_by_definition(whole, spec, mesh) for name, whole in expected.results.of_tokens.items()}
    for found, wanted in ((results.of_tokens, parts), (results.of_all, expected.results.of_all)):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert_same(tensor, wanted[name], name, tolerance=case.tolerance)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in expected.gradients, f"{name} has no gradient"
        else:
            check(name, parameter.grad, expected.gradients[name], "gradient of")
            check(name, parameter, expected.parameters[name], "after training:")


def each_topic(**topics: Iterable[Case]) -> Any:
    """Parametrize a test by lists of cases that the same ranks run one after the other; slow cases are lists too."""
    parameters = []
    for topic, cases in topics.items():
        ordered = sorted(cases, key=lambda case: (case.slow, case.layout.world_size))
        for (slow, size), group in itertools.groupby(ordered, key=lambda case: (case.slow, case.layout.world_size)):
            name = f"{topic} on {size} ranks" + ", others" * slow
            parameters.append(pytest.param([*group], id=name, marks=pytest.mark.slow if slow else ()))
    return pytest.mark.parametrize("cases", parameters)


def check_cases(cases: list[Case]) -> None:
    """Train each case in this process, and on ranks; the cases are on as many ranks."""
    both = {str(case): (case, of_one_process(case.model, case.train)) for case in cases}
    assert len(both) == len(cases), "claims on the same mesh must differ"
    run_cases(lambda name: check_case(*both[name]), cases[0].layout.world_size, [(name,) for name in both])
