"""Frozen experts in 4 and 8 bits against the same layer with weights of the dtype of the tokens.

forward: the output alone. forward+backward: with adapters of rank 8 beside gate, up and down, the output and the
gradients of x, of the routing weights and of the adapters. Before the timing, the results of every format must equal
those of its dequantized weights to the bit.

A shape stands for a layer; T is 1, 4 and 16 (forward only), 512 and 2048. A call computes at least 32 tokens, T at a
time, each time with other experts, so that the weights of few tokens come from memory and not from a cache. Ratios are
medians over rounds, in each of which all formats are timed in turn. Share of memory speed: bytes of the weights of the
selected experts over the time, divided by the speed at which `torch.sum` reads 256 MiB, timed in the same rounds.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.adapters import median_ratio
from benchmarks.command import Benchmark, Session, main
from benchmarks.figures import time_panels
from benchmarks.problem import SKEW
from benchmarks.results import Case, Result, by_case, milliseconds, table, timing_report
from benchmarks.shapes import FROZEN, AnyShape, Shape
from benchmarks.timing import Runner
from maxmoe.ops import LowRankFactors, Projection, RaggedPlan, expert_ffn, ragged_plan
from maxmoe.quantization import FORMATS, quantize

FEW, MANY = (1, 4, 16), (512, 2048)
TOKENS_PER_CALL = 32
RANK = 8
DENSE, READ = "maxmoe, not quantized", "read"
NAMES = {format: f"maxmoe, {format}" for format in FORMATS}


class Batch(NamedTuple):
    """Tokens ``(T, D)``, their routing weights ``(T, K)``, and the plan of their experts."""

    x: Tensor
    weights: Tensor
    plan: RaggedPlan


class Experts(NamedTuple):
    """Gate, up and down of a layer."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def bytes_per_expert(self) -> float:
        """Bytes of the three matrices of one expert."""
        return sum(matrices.nbytes for matrices in self) / self.gate.shape[0]


def points(shape: AnyShape, mode: str) -> list[Shape]:
    """The layer with each number of tokens."""
    assert isinstance(shape, Shape)
    return [shape._replace(num_tokens=number) for number in (*(FEW if mode == "forward" else ()), *MANY)]


@lru_cache(maxsize=1)
def all_experts(layer: Shape, dtype: torch.dtype) -> dict[str, Experts]:
    """The weights in each format, by the name of the contender: one expert, and copies of it."""
    generator = torch.Generator().manual_seed(0)
    _, D, F, E, _ = layer
    sizes = ((D, F), (D, F), (F, D))
    one = [torch.randn(1, *size, generator=generator).mul_(size[0] ** -0.5).to(dtype) for size in sizes]
    experts = {DENSE: Experts(*(weight.repeat(E, 1, 1) for weight in one))}
    for format, name in NAMES.items():
        stacks = [quantize(weight, format) for weight in one]
        experts[name] = Experts(*(stack.map(lambda part: part.repeat(E, 1, 1)) for stack in stacks))
    return experts


def make_batches(shape: Shape, dtype: torch.dtype) -> list[Batch]:
    """The batches of a call. Routers prefer some experts, as in `benchmarks.problem`."""
    generator = torch.Generator().manual_seed(0)
    T, D, _, E, K = shape
    batches = []
    for _ in range(max(1, TOKENS_PER_CALL // T)):
        logits = torch.randn(T, E, generator=generator) + torch.linspace(SKEW, 0, E)
        scores, experts = logits.softmax(-1).topk(K)
        x = torch.randn(T, D, generator=generator).to(dtype)
        batches.append(Batch(x, scores / scores.sum(-1, keepdim=True), ragged_plan(experts, E, num_rows=T * K)))
    return batches


def make_factors(shape: Shape, dtype: torch.dtype) -> list[LowRankFactors]:
    """Adapters beside gate, up and down."""
    generator = torch.Generator().manual_seed(1)
    _, D, F, E, _ = shape
    factors = []
    for rows, columns in ((D, F), (D, F), (F, D)):
        a, b = (torch.randn(E, *size, generator=generator) for size in ((rows, RANK), (RANK, columns)))
        factors.append(LowRankFactors(a.mul_(rows**-0.5).to(dtype), b.mul_(0.1).to(dtype)))
    return factors


def compute(experts: Experts, batch: Batch, factors: Sequence[LowRankFactors]) -> list[Tensor]:
    """The output, and with factors the gradients."""
    x, weights, plan = batch
    if not factors:
        with torch.no_grad():
            return [expert_ffn(x, weights, plan, *experts)]
    leaves = [leaf.requires_grad_() for leaf in (x, weights, *(part for each in factors for part in (each.a, each.b)))]
    projections = [Projection(stack, factors=each) for stack, each in zip(experts, factors, strict=True)]
    output = expert_ffn(x, weights, plan, *projections)
    return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def check(name: str, experts: Experts, batch: Batch, factors: Sequence[LowRankFactors]) -> None:
    """Raise unless the results equal the ones of the dequantized weights, bit for bit."""
    dense = Experts(*(stack.dequantize() for stack in experts))
    pairs = zip(compute(experts, batch, factors), compute(dense, batch, factors), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise RuntimeError(f"{name} and its dequantized weights give different results")


@lru_cache(maxsize=1)
def large_tensor() -> Tensor:
    """256 MiB, more than caches hold."""
    return torch.ones(2**26)


def measure(session: Session, case: Case) -> None:
    """Time all formats in one case."""
    shape = case.shape
    assert isinstance(shape, Shape)
    experts = all_experts(shape._replace(num_tokens=0), case.dtype)
    batches = make_batches(shape, case.dtype)
    factors = make_factors(shape, case.dtype) if case.mode == "forward+backward" else []
    num_read = sum(int((batch.plan.group_sizes > 0).sum()) for batch in batches)
    for name in NAMES.values():
        check(name, experts[name], batches[0], factors)

    def call(of: Experts) -> Callable[[], object]:
        return lambda: [compute(of, batch, factors) for batch in batches]

    runners = [Runner(name, call(of), "alternative" if name == DENSE else "maxmoe") for name, of in experts.items()]
    before = len(session.results)
    session.time(case, [*runners, Runner(READ, large_tensor().sum, "part")])
    for result in session.results[before:]:
        if result.contender == READ:
            result.numbers = {"batches": 1, "bytes": large_tensor().nbytes}
        else:
            num_bytes = experts[result.contender].bytes_per_expert * num_read
            result.numbers = {"batches": len(batches), "bytes": num_bytes}


def summary(results: list[Result]) -> str:
    """Times of the formats relative to dense weights, and the share of memory speed for few tokens."""
    times, shares = [], []
    for case, group in by_case(results).items():
        of = {result.contender: result for result in group if result.numbers}
        assert isinstance(case.shape, Shape)
        labels = [case.name, str(case.shape.num_tokens), case.dtype_name, case.mode]
        if DENSE in of:
            dense = of[DENSE]
            seconds = statistics.median(dense.seconds) / dense.numbers["batches"]
            ratios = [f"{median_ratio(of[name], dense):.2f}" if name in of else "" for name in NAMES.values()]
            times.append([*labels, milliseconds(seconds), *ratios])
        if READ in of and case.shape.num_tokens in FEW:
            names = (DENSE, *NAMES.values())
            shares.append(
                [*labels, *(f"{speed(of[name]) / speed(of[READ]):.2f}" if name in of else "" for name in names)]
            )
    header = ["layer", "T", "dtype", "mode"]
    parts = []
    if times:
        parts.append(f"Time over that without quantization\n{table([*header, f'{DENSE}, ms', *FORMATS], times)}")
    if shares:
        parts.append(f"Share of memory speed\n{table([*header, 'not quantized', *FORMATS], shares)}")
    return "\n\n".join(parts)


def speed(result: Result) -> float:
    """Bytes per second."""
    return result.numbers["bytes"] / statistics.median(result.seconds)


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


BENCHMARK = Benchmark(
    "quantized", __doc__, FROZEN, ["forward", "forward+backward"], measure, report, time_panels, points=points
)

if __name__ == "__main__":
    main(BENCHMARK)
