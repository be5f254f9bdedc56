"""Functions and classes without a name arrive whole, and use the globals of their module."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import sent_functions

counted: list[int] = []


def arrived(value: Any) -> Any:
    sent, _ = sent_functions.dumps(value)
    return pickle.loads(sent)


def test_closures() -> None:
    factor, summands = 2, torch.ones(3)

    def scaled(x: Tensor, *, offset: float = 1.0) -> Tensor:
        """A docstring."""
        return factor * x + summands + offset

    scaled.attribute = "kept"  # type: ignore[attr-defined]
    got = arrived(partial(scaled, offset=3.0))
    assert got(torch.ones(3)).equal(torch.full((3,), 6.0))
    assert got.func.__defaults__ is None and got.func.__kwdefaults__ == {"offset": 1.0}
    assert got.func.__doc__ == "A docstring." and got.func.attribute == "kept" and got.func is not scaled


def test_closures_share_their_cells() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    def recursive(n: int) -> int:
        count()
        return calls if n == 0 else recursive(n - 1)

    got: tuple[Callable[[int], int], Callable[[], None]] = arrived((recursive, count))
    assert got[0](3) == 4 and calls == 0
    got[1]()
    assert got[0](0) == 6


def test_globals_are_those_of_the_module() -> None:
    counted.clear()
    arrived(lambda: counted.append(1))()
    assert counted == [1]
    assert arrived(test_closures) is test_closures and sent_functions.dumps(test_closures)[1] == [__name__]


def test_local_classes() -> None:
    class Base(nn.Module):
        @staticmethod
        def two() -> int:
            return 2

        @property
        def three(self) -> int:
            return 3

        def forward(self, x: Tensor) -> Tensor:
            return x * self.two() * self.three

    class Derived(Base):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight

    model, kind = arrived((Derived(), Derived))
    assert type(model) is kind and kind is not Derived
    assert model(torch.ones(2)).tolist() == kind()(torch.ones(2)).tolist() == [6.0, 6.0]


def test_tensors_keep_their_gradients() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    got, same = arrived((layer, layer.weight))
    assert got.weight is same and isinstance(same, nn.Parameter)
    for name, parameter in layer.named_parameters():
        assert got.get_parameter(name).equal(parameter)
        assert got.get_parameter(name).grad.equal(parameter.grad)


def test_what_no_module_has_is_refused() -> None:
    globals_of_nobody: dict[str, Any] = {"__name__": "nobody"}
    exec("def function(): pass", globals_of_nobody)
    with pytest.raises(pickle.PicklingError, match="function is in no module that another process can import"):
        sent_functions.dumps(globals_of_nobody["function"])
