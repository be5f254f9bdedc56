"""Arguments of operators with quantized matrices: errors, and arguments that stay unchanged."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops
from support.matrix_calls import PROJECTIONS, gmm_call
from support.memory import saved_for_backward
from support.named import named
from support.operator_calls import refusal
from support.operator_checks import ExecutedOperators, ignore_warnings_of_transforms
from support.quantized_calls import ROWS, VARIANTS, Variant, ffn_call, random_stack


def raw_gmm(**changes: Any) -> dict[str, Any]:
    """Arguments of torch.ops.maxmoe.gmm: L 2, D 70, F 40, rows of codes along D."""
    stack = random_stack(Variant("int4", torch.float32, 32, has_zeros=True), (2, 70, 40))
    given = {"lhs": torch.randn(6, 70), "group_sizes": torch.tensor([2, 3])}
    return {**given, **ops.Projection(stack).arguments("rhs", torch.float32), **changes}


FACTORS = {"rhs_a": torch.randn(2, 70, 3), "rhs_b": torch.randn(2, 3, 40)}


def raw_ffn(**changes: Any) -> dict[str, Any]:
    """Arguments of torch.ops.maxmoe.expert_ffn: D 96, F 40, 11 experts."""
    arguments = {**ffn_call(Variant("fp8_row", torch.float32), (96, 40)).cast(torch.float32).arguments}
    plan = arguments.pop("plan")
    arguments |= {name: getattr(plan, name) for name in ("slots", "rows", "group_sizes", "top_k")}
    for name in PROJECTIONS:
        arguments |= ops.Projection(arguments[name]).arguments(name, torch.float32)
    return {**arguments, **changes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        Variant("int4", torch.float32, 128, has_zeros=True),
        Variant("int8", torch.float32),
        Variant("fp8_block", torch.float32),
        Variant("nvfp4", torch.uint8),
    ],
    ids=str,
)
def test_autocast(path: str, dtype: torch.dtype, variant: Variant) -> None:
    """Scales stay float32."""
    for call in (gmm_call(ROWS, random_stack(variant, (len(ROWS), 96, 50))), ffn_call(variant, (96, 50))):
        call = call.cast(torch.float32)
        with torch.autocast("cpu", dtype):
            got = call()[0]
        weights = {name: value for name, value in call.arguments.items() if name == "weights"}
        assert got.dtype == dtype and torch.equal(got, call.cast(dtype).replace(**weights)()[0])


@ignore_warnings_of_transforms
def test_scales_have_neither_gradient_nor_tangent(path: str) -> None:
    nvfp4 = ops.Projection(random_stack(Variant("nvfp4", torch.uint8), (2, 70, 40))).arguments("rhs", torch.float32)
    for operator, arguments, name in (
        ("gmm", raw_gmm(), "rhs_scales"),
        ("gmm", raw_gmm(**nvfp4), "rhs_row_scales"),
        ("gmm", raw_gmm(**FACTORS), "rhs_scales"),
        *(("expert_ffn", raw_ffn(), f"{name}_scales") for name in PROJECTIONS),
    ):

        def run(scales: Tensor, operator=operator, arguments=arguments, name=name) -> Tensor:
            return getattr(torch.ops.maxmoe, operator)(**{**arguments, name: scales})

        with refusal(operator, name, "frozen"):
            run(arguments[name].clone().requires_grad_())
        with refusal(operator, "frozen"):
            torch.func.jvp(run, (arguments[name],), (torch.ones_like(arguments[name]),))


def test_nothing_is_dequantized_for_backward() -> None:
    for call in (gmm_call(ROWS, random_stack(VARIANTS[0], (11, 96, 50))), ffn_call(VARIANTS[0], (96, 50))):
        with saved_for_backward() as saved, ExecutedOperators() as executed:
            outputs = call.trainable()()
            outputs[0].sum().backward()
        floats = max([0, *(tensor.numel() for tensor in saved if tensor.is_floating_point())])
        assert floats <= 148 * 100 < 11 * 96 * 50
        # The gradient of the bias of gmm is a product with ones by tgmm.
        forbidden = {"dequantize"} if call.operator == "gmm" else {"dequantize", "tgmm"}
        assert not {name for name, _ in executed.calls} & forbidden


# Errors


ONE = torch.ones(2, 40, 3)
REFUSED_OF_STACKS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"{}": torch.zeros(2, 40, 34, dtype=torch.uint8)}, ("{} must have 35 bytes", "70 columns", "[2, 40, 34]")),
    ({"{}": torch.zeros(2, 40, 35)}, ("{} must be uint8", "int4", "Float")),
    ({"{}": torch.zeros(40, 35, dtype=torch.uint8)}, ("{}", "[L, rows, bytes]", "[40, 35]")),
    ({"{}_scales": ONE[:, :, :2]}, ("{}_zeros", "shape of the scales, [2, 40, 2]", "[2, 40, 3]")),
    ({"{}_scales": torch.ones(2, 40, 4), "{}_zeros": None}, ("{}_scales", "[2, 40, 3]", "[2, 40, 4]")),
    ({"{}_scales": torch.ones(2, 40, 0)}, ("{}_scales", "int4 of 40 x 70", "[2, 40, 0]")),
    ({"{}_scales": torch.ones(1, 40, 3)}, ("{}_scales", "[2, 40, 3]", "[1, 40, 3]")),
    ({"{}_scales": torch.ones(2, 41, 3)}, ("{}_scales", "[2, 40, 3]", "[2, 41, 3]")),
    ({"{}_scales": ONE.double()}, ("{}_scales must be float32, bfloat16 or float16", "int4", "Double")),
    ({"{}_scales": ONE.byte()}, ("{}_scales must be float32", "int4", "Byte")),
    ({"{}_scales": ONE.to("meta")}, ("{}_scales", "cpu", "meta")),
    ({"{}_zeros": ONE}, ("{}_zeros must be uint8", "[2, 40, 3]", "Float")),
    ({"{}_zeros": ONE[:1].byte()}, ("{}_zeros", "[2, 40, 3]", "[1, 40, 3]")),
    ({"{}_row_scales": ONE[..., :1]}, ("{}_row_scales must be None", "int4", "[2, 40, 1]")),
    ({"{}_format": "int5"}, ("{}_format must be one of mxfp4", "int5")),
    ({"{}_format": "nf4"}, ("{}_scales", "[2, 40, 2]", "nf4", "[2, 40, 3]")),
    ({"{}_format": "mxfp4"}, ("{}_scales must be uint8", "mxfp4", "Float")),
    ({"{}_format": "int8"}, ("{} must have 70 bytes", "int8", "[2, 40, 35]")),
]
REFUSED_OF_OPERANDS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"{}_scales": None}, ("{}_scales must be given", "int4", "None")),
    ({"{}_format": None}, ("{}", "None without rhs_format")),
    ({"{}_columns": -1}, ("bytes per row for -1 columns",)),
    ({"{}_columns": 2**62}, ("bytes per row", str(2**62))),
    ({"{}_columns": 69}, ("70", "69")),
    ({"{}_is_transposed": False}, ("rhs must have matrices of 70", "40 x 70")),
    ({"{}_bias": torch.ones(2, 70)}, ("{}_bias", "40", "[2, 70]")),
    ({"{}": torch.zeros(3, 40, 35, dtype=torch.uint8)}, ("{}_scales", "[3, 40, 3]", "[2, 40, 3]")),
]


def named_for(name: str, texts: Any) -> Any:
    """Return argument names and words of a message for a stack; an empty name stands for the argument of dequantize."""
    if isinstance(texts, dict):
        return {named_for(name, text): value for text, value in texts.items()}
    if isinstance(texts, tuple):
        return tuple(named_for(name, text) for text in texts)
    return texts.format(name) if name else texts.replace("{}_", "").replace("{}", "codes")


def test_gmm_refuses(path: str) -> None:
    for (changes, words), factors in product(REFUSED_OF_STACKS + REFUSED_OF_OPERANDS, ({}, FACTORS)):
        with named(words), refusal("gmm", *named_for("rhs", words)):
            torch.ops.maxmoe.gmm(**raw_gmm(**named_for("rhs", changes)), **factors)


def test_dequantize_refuses(path: str) -> None:
    given = raw_gmm()
    parts = {"codes": given["rhs"], "scales": given["rhs_scales"], "zeros": given["rhs_zeros"], "row_scales": None}
    parts |= {"format": "int4", "columns": 70, "dtype": torch.float32}
    dtypes = [torch.int32, torch.float8_e4m3fn, torch.complex64, torch.bool]
    for changes, words in [*REFUSED_OF_STACKS, *(({"dtype": dtype}, ("dtype",)) for dtype in dtypes)]:
        with named(words), refusal("dequantize", *named_for("", words)):
            torch.ops.maxmoe.dequantize(**{**parts, **named_for("", changes)})


def test_stacks_of_other_shapes() -> None:
    stack = random_stack(VARIANTS[0], (3, 64, 32), is_transposed=False)
    with refusal("gmm", "rhs must have matrices of 64", "32 x 64"):
        gmm_call((1, 2, 3), stack).replace(rhs=stack.mT)()
