"""Floating-point operations of operators: the formulas of torch, of attention on the CPU, and of `maxmoe.ops`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from maxmoe._torch import argument_names, attention_of_cpu

PROJECTIONS = ("gate", "up", "down")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]


def _products(num_rows: int, arguments: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield the operations of the products of rows with each stack of matrices and of factors, with its name."""
    for name in names:
        if arguments.get(name) is None:
            continue
        is_quantized = arguments.get(f"{name}_format") is not None
        _, rows, columns = arguments[name].shape
        yield name, 2 * num_rows * rows * (arguments[f"{name}_columns"] if is_quantized else columns)
        for factor in (f"{name}_a", f"{name}_b"):
            if arguments.get(factor) is not None:
                yield factor, 2 * num_rows * arguments[factor].shape[1] * arguments[factor].shape[2]


def _gmm(arguments: Mapping[str, Any]) -> int:
    return sum(flops for _, flops in _products(len(arguments["lhs"]), arguments, ("rhs",)))


def _tgmm(arguments: Mapping[str, Any]) -> int:
    return int(2 * arguments["lhs"].numel() * arguments["rhs"].shape[1])


def _linear(arguments: Mapping[str, Any]) -> int:
    return 2 * len(arguments["x"]) * int(arguments["weight"].numel())


def _forward(arguments: Mapping[str, Any]) -> int:
    return sum(flops for _, flops in _products(len(arguments["slots"]), arguments, PROJECTIONS))


def _backward(arguments: Mapping[str, Any]) -> int:
    products = dict(_products(len(arguments["slots"]), arguments, PROJECTIONS))
    fields = ("", "_bias", "_a", "_b")
    names = ["x", "weights", *(name + field for name in PROJECTIONS for field in fields)]
    wanted = {name for name, is_wanted in zip(names, arguments["output_mask"], strict=True) if is_wanted}
    inner = [name for name in products if not name.startswith("down")]  # their input is x
    inputs = products.keys() - (set() if "x" in wanted else inner)
    again = inner if arguments.get("recompute") else []
    return sum(products[name] for name in (*inputs, *(wanted & products.keys()), *again))


def _formula(operator: str, count: Callable[[Mapping[str, Any]], int]) -> Callable[..., int]:
    names = argument_names(getattr(torch.ops.maxmoe, operator).default)
    return lambda *args, out_val, **kwargs: count(dict(zip(names, args, strict=False)) | kwargs)


FLOPS: dict[Any, Callable[..., int]] = {**flop_registry, attention_of_cpu: _attention} | {
    getattr(torch.ops.maxmoe, operator): _formula(operator, count)
    for operator, count in {
        "gmm": _gmm,
        "tgmm": _tgmm,
        "linear": _linear,
        "expert_ffn_forward": _forward,
        "expert_ffn_backward": _backward,
    }.items()
}
