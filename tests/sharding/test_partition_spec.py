"""PartitionSpec: forms of entries, invalid entries, gathering over axes."""

import copy
import pickle
import re

import pytest

from maxmoe.sharding import P, PartitionSpec


def test_iteration_gives_tuples_of_axes() -> None:
    spec = P(None, "fsdp", ("expert", "tensor"), (), ["data"])
    assert list(spec) == [(), ("fsdp",), ("expert", "tensor"), (), ("data",)]
    assert len(spec) == 5 and spec[1] == ("fsdp",)


def test_a_scalar_has_no_dims() -> None:
    assert list(P()) == [] and repr(P()) == "P()"
    assert P().without("fsdp") == P()


def test_specs_that_mean_the_same_are_equal() -> None:
    assert P("fsdp", None) == P(("fsdp",), ()) == PartitionSpec(["fsdp"], None)
    assert len({P("fsdp", None), P(("fsdp",), ()), P(None, "fsdp")}) == 2
    assert P(("fsdp", "expert")) != P(("expert", "fsdp"))
    assert P("fsdp") != P("fsdp", None)


def test_repr_is_what_one_writes() -> None:
    spec = P(None, "fsdp", ("expert", "tensor"))
    assert repr(spec) == "P(None, 'fsdp', ('expert', 'tensor'))"
    assert eval(repr(spec)) == spec


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
@pytest.mark.parametrize("spec", [P(), P(None), P("fsdp", None, ("expert", "tensor"))], ids=repr)
def test_copies_are_equal_specs(spec: PartitionSpec, again) -> None:
    assert again(spec) == spec and type(again(spec)) is PartitionSpec


def test_without_strips_axes_wherever_they_are() -> None:
    spec = P(("expert", "fsdp"), "fsdp_transpose", None, "tensor")
    assert spec.without("fsdp") == P("expert", "fsdp_transpose", None, "tensor")
    assert spec.without("fsdp", "fsdp_transpose") == P("expert", None, None, "tensor")
    assert spec.without("absent") == spec == spec.without()
    assert type(spec.without("fsdp")) is PartitionSpec


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            ("fsdp", None, ("expert", "fsdp")),
            "axis 'fsdp' shards dim 0 and dim 2 of P('fsdp', None, ('expert', 'fsdp'))",
        ),
        ((None, ("fsdp", "fsdp")), "dim 1 of a PartitionSpec has the axis 'fsdp' twice: ('fsdp', 'fsdp')"),
        ((0,), "dim 0 of a PartitionSpec must be None, an axis or a tuple of axes, got 0"),
        (("",), "dim 0 of a PartitionSpec must be None, an axis or a tuple of axes, got ''"),
        (((None,),), "dim 0 of a PartitionSpec must be None, an axis or a tuple of axes, got (None,)"),
        (({"fsdp"},), "dim 0 of a PartitionSpec must be None, an axis or a tuple of axes, got {'fsdp'}"),
    ],
)
def test_errors_name_dims_and_axes(dims, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        P(*dims)
