"""Layouts of the low-rank factors of experts in the files of PEFT, inference servers and converters.

E experts, F intermediate_size, D hidden_size, r the rank. Matrices are [out, in], as in `torch.nn.Linear`: an adapter
adds scale * B A with A [r, in] and B [out, r]. Factors are mappings of `Factors` by the name of the projection, with
gate and up apart or in one, "gate_up_proj".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe.declaration import FusedGate, gate_up_slices

# "peft": parameters of all experts, as PEFT saves them since 0.19.1. "peft_0.18": before, where A had the first dim of
# each matrix of a parameter and B the last one, whichever was the input. "vllm_stacked": as "peft", with published
# names. "per_expert": every matrix a linear module of its own. "sglang_stacked" and "shared_outer": tensors with an
# expert dim, which has size one for a factor that all experts share.
AdapterLayout: TypeAlias = Literal["peft", "peft_0.18", "per_expert", "vllm_stacked", "sglang_stacked", "shared_outer"]
WITH_SHARED = ("sglang_stacked", "shared_outer")  # others have a copy for each expert
W123 = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Factors(NamedTuple):
    """Factors of one projection of all experts; the first dim is one for a factor that they share."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, out, r)

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return max(len(self.a), len(self.b))

    def expanded(self) -> "Factors":
        """Return the factors with a view of a shared one for each expert."""
        return Factors(*(each.expand(self.num_experts, -1, -1) for each in self))

    def swapped(self) -> "Factors":
        """Return the factors of the transposed matrices."""
        return Factors(self.b.mT, self.a.mT)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Factors":
        """Return function(tensor) in the place of both tensors."""
        return Factors(function(self.a), function(self.b))


Experts: TypeAlias = Mapping[str, Factors]


@dataclass(frozen=True)
class ExpertNames:
    """Names and orders of the matrices of experts in a family of models.

    Args:
        model: name of the model, for messages.
        gate: order of gate and up in `gate_up_proj`; None for experts without a gate.
        published: name of each projection in a published checkpoint, as "experts.{expert}.w1"; None for stacks.
        is_transposed: whether parameters in memory are [out, in]; for layout "peft_0.18" alone.
        vllm_refuses_stacks: whether vLLM leaves out stacked adapters of the family.
    """

    model: str
    gate: FusedGate | None
    published: Mapping[str, str] | None
    is_transposed: bool = False
    vllm_refuses_stacks: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the projections of an expert."""
        return ("up_proj", "down_proj") if self.gate is None else ("gate_proj", "up_proj", "down_proj")

    def check(self, layout: AdapterLayout) -> None:
        """Raise for a layout that the family does not have."""
        if layout == "per_expert" and self.published is None:
            raise ValueError(
                f"layout 'per_expert' needs published names of the matrices of an expert; {self.model} has none"
            )
        if layout in ("vllm_stacked", "sglang_stacked", "shared_outer") and self.gate is None:
            raise ValueError(f"layout {layout!r} needs experts with a gate, {self.model} has none: use 'per_expert'")
        if layout == "sglang_stacked" and self.gate == "interleaved":
            raise ValueError(f"layout 'sglang_stacked' needs the gate before up, in {self.model} they alternate")
        if layout == "vllm_stacked" and self.vllm_refuses_stacks:
            raise ValueError(f"vLLM leaves out stacked adapters of {self.model} (vllm-project/vllm#41754)")


def arranged(layout: AdapterLayout, experts: Experts, names: ExpertNames) -> dict[str, Factors]:
    """Return the factors with gate and up apart, or in one, as a layout has them, in the order of the parameters."""
    are_apart = layout in ("per_expert", "shared_outer")
    if layout == "sglang_stacked":
        separate = apart(experts, names)
        are_apart = not separate["gate_proj"].a.equal(separate["up_proj"].a)
    found = apart(experts, names) if are_apart else fused(experts, names)
    return {name: found[name] for name in ("gate_up_proj", *W123) if name in found}


def tensors_of(layout: AdapterLayout, base: str, experts: Experts, names: ExpertNames) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the experts of a block by name.

    Args:
        layout: layout of the tensors.
        base: name of the block in the file, with a dot at its end.
        experts: factors of the projections, as `arranged` returns them.
        names: names of the family.
    """
    match layout:
        case "per_expert":
            assert names.published is not None
            for name, factors in experts.items():
                for expert, pair in enumerate(zip(*factors.expanded(), strict=True)):
                    yield from _pair(f"{base}{names.published[name].format(expert=expert)}", *pair)
        case "shared_outer":
            for name, factors in experts.items():
                yield from _pair(f"{base}experts.{W123[name]}", *factors)
        case "sglang_stacked":
            for name, factors in experts.items():
                yield from _pair(f"{base}experts.{name}", *factors)
        case "peft" | "peft_0.18" | "vllm_stacked":
            is_swapped = layout == "peft_0.18" and names.is_transposed
            for level, factors in enumerate([*experts.values()][::-1]):
                each = factors.expanded().swapped() if is_swapped else factors.expanded()
                yield from _pair(f"{base}experts{'.base_layer' * level}", *packed(each))


def packed(factors: Factors) -> Factors:
    """Return factors as PEFT packs them: ``(E r, in)`` by expert, ``(out, r E)`` with the expert as fastest index."""
    return Factors(factors.a.flatten(0, 1), factors.b.permute(1, 2, 0).flatten(1))


def unpacked(factors: Factors, rank: int, *, b_by_expert: bool = False) -> Factors:
    """Return packed factors as stacks; `b_by_expert` if the columns of an expert in B follow each other."""
    a, b = factors
    if b_by_expert:
        columns = b.reshape(len(b), -1, rank).permute(1, 0, 2)
    else:
        columns = b.reshape(len(b), rank, -1).permute(2, 0, 1)
    return Factors(a.reshape(-1, rank, a.shape[1]), columns)


def apart(experts: Experts, names: ExpertNames) -> dict[str, Factors]:
    """Return the factors of each projection, with gate and up apart.

    Two adapters side by side, one of the gate and one of up, become two again.
    """
    if "gate_up_proj" not in experts:
        return {name: experts[name] for name in names.projections if name in experts}
    assert names.gate is not None
    a, b = experts["gate_up_proj"]
    gate, up = (b[:, half] for half in gate_up_slices(b.shape[1], names.gate))
    half = b.shape[2] // 2
    is_side_by_side = (
        b.shape[2] % 2 == 0 and gate.any() and up.any() and not gate[..., half:].any() and not up[..., :half].any()
    )
    first, second = (slice(0, half), slice(half, None)) if is_side_by_side else (slice(None), slice(None))
    separate = {
        "gate_proj": Factors(a[:, first], gate[..., first]),
        "up_proj": Factors(a[:, second], up[..., second]),
    }
    return separate | {name: factors for name, factors in experts.items() if name != "gate_up_proj"}


def fused(experts: Experts, names: ExpertNames) -> dict[str, Factors]:
    """Return the factors with gate and up in one projection.

    Gate and up with one A keep it. Others lie side by side, with twice the rank: [B_g 0; 0 B_u] [A_g; A_u].
    """
    if "gate_proj" not in experts:
        return dict(experts)
    assert names.gate is not None
    rank = max(experts[name].a.shape[1] for name in ("gate_proj", "up_proj"))
    gate, up = (padded(experts[name], rank) for name in ("gate_proj", "up_proj"))
    if gate.a.equal(up.a):
        a, columns = gate.a, (slice(None), slice(None))
    else:
        count = max(len(gate.a), len(up.a))
        a = torch.cat([each.a.expand(count, -1, -1) for each in (gate, up)], dim=1)
        columns = slice(0, rank), slice(rank, None)
    width = gate.b.shape[1]
    b = gate.b.new_zeros(len(gate.b), 2 * width, a.shape[1])
    for half, each, of_rank in zip(gate_up_slices(2 * width, names.gate), (gate.b, up.b), columns, strict=True):
        b[:, half, of_rank] = each
    others = {name: factors for name, factors in experts.items() if name not in ("gate_proj", "up_proj")}
    return {"gate_up_proj": Factors(a, b), **others}


def padded(factors: Factors, rank: int) -> Factors:
    """Return factors with rows and columns of zeros up to a rank."""
    return Factors(with_zeros(factors.a, 1, rank), with_zeros(factors.b, 2, rank))


def with_zeros(factor: Tensor, dim: int, rank: int) -> Tensor:
    """Return a factor with zeros up to a rank, which is the size of a dim."""
    shape = [*factor.shape]
    shape[dim] = rank - shape[dim]
    return torch.cat([factor, factor.new_zeros(shape)], dim) if shape[dim] else factor


def trimmed(factors: Factors) -> Factors:
    """Return factors without the last rows of A that are zero, as the columns of B are, in all experts."""
    a, b = factors
    is_used = (a != 0).any(2).any(0) | (b != 0).any(1).any(0)
    rank = max(1, int(is_used.nonzero().max()) + 1 if is_used.any() else 0)
    return Factors(a[:, :rank], b[:, :, :rank])


def collapsed(projection: str, factors: Factors) -> Factors:
    """Return factors with one factor of the hidden size if all experts have the same one."""
    a, b = factors
    outer = b if projection == "down_proj" else a
    if not outer.equal(outer[:1].expand_as(outer)):
        return factors
    return Factors(a, b[:1]) if projection == "down_proj" else Factors(a[:1], b)


def is_shared(projection: str, factors: Factors) -> bool:
    """Return whether the experts have one factor of the hidden size."""
    return len(factors.b if projection == "down_proj" else factors.a) == 1


def unified(layout: AdapterLayout, blocks: Mapping[str, Experts], where: str) -> dict[str, Experts]:
    """Return the factors of all blocks, each shared one once if the layout has such factors and all blocks share them.

    Raises a ValueError that begins with `where` if they must and do not.
    """
    once = {block: {name: collapsed(name, each) for name, each in experts.items()} for block, experts in blocks.items()}
    are_shared = layout in WITH_SHARED and all(
        is_shared(*each) for experts in once.values() for each in experts.items()
    )
    check_shared(layout, are_shared, where)
    if are_shared:
        return dict(once)
    return {block: {name: each.expanded() for name, each in experts.items()} for block, experts in blocks.items()}


def check_shared(layout: AdapterLayout, are_shared: bool, where: str) -> None:
    """Raise if the experts must share factors and do not."""
    if layout == "shared_outer" and not are_shared:
        raise ValueError(
            f"{where}: the experts of each layer must have one A for gate and up and one B for down in the layout "
            "'shared_outer', got different ones"
        )


def filled(experts: Experts, names: ExpertNames) -> dict[str, Factors]:
    """Return the factors with zeros for the projections without an adapter, which servers need."""
    result = dict(experts)
    is_fused = "gate_up_proj" in result
    first = "gate_up_proj" if is_fused else names.projections[0]
    up = next((result[name] for name in (first, "up_proj") if name in result), None)
    down = result.get("down_proj")
    like = up or down
    assert like is not None
    if up is not None:
        hidden, width = up.a.shape[2], up.b.shape[1] // (2 if is_fused else 1)
    else:
        width, hidden = like.a.shape[2], like.b.shape[1]
    for name in names.projections:
        if name not in result and not (is_fused and name in ("gate_proj", "up_proj")):
            size_in, size_out = (width, hidden) if name == "down_proj" else (hidden, width)
            result[name] = Factors(
                like.a.new_zeros(like.num_experts, 1, size_in), like.b.new_zeros(like.num_experts, size_out, 1)
            )
    return result


def _pair(name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.lora_A.weight", a
    yield f"{name}.lora_B.weight", b
