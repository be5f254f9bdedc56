"""The tests of every operator for gmm and expert_ffn with quantized stacks, by default a few cases of each.

test_quantized.py compares their bits with those of dense matrices, which the same tests check in all cases.
"""

import pytest

from maxmoe.quantization import quantize
from support import low_rank_calls
from support.ffn_call import ffn_call
from support.operator_calls import Call
from support.operator_checks import OperatorTests
from support.shapes import Shape

STACKS = ("rhs", "gate", "up", "down")


def quantized(call: Call, format: str = "mxfp4") -> Call:
    """The call with quantized matrices. Values of MXFP4 are exact in all dtypes."""
    matrices = {name: value for name, value in call.arguments.items() if name in STACKS and value is not None}
    return call.replace(**{name: quantize(value, format) for name, value in matrices.items()})


@pytest.mark.sampled(4)
class TestGmm(OperatorTests):
    def call(self, shape: Shape) -> Call:
        call = low_rank_calls.gmm_call(shape)
        return quantized(Call("gmm", {name: value for name, value in call.arguments.items() if "factors" not in name}))


@pytest.mark.sampled(4)
class TestGmmWithFactors(OperatorTests):
    roundings = 3
    shared_in_backward = frozenset({"gmm"})  # the gradients of lhs and of a share a product

    def call(self, shape: Shape) -> Call:
        return quantized(low_rank_calls.gmm_call(shape))


@pytest.mark.sampled(6)
class TestExpertFfn(OperatorTests):
    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})

    def call(self, shape: Shape) -> Call:
        return quantized(low_rank_calls.with_factors(ffn_call(shape, bias=False)))  # test_quantized.py has biases
