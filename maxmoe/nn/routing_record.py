"""Expert ids of the MoE layers of a model: of recorded calls, in files, and in the arrays of inference servers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from maxmoe.files import replacing
from maxmoe.nn.routing import NO_EXPERT


@dataclass(frozen=True)
class RoutingRecord:
    """Expert ids of the MoE layers of a model, for each call.

    Args:
        calls: for each path of a layer, the expert ids ``(..., S, K)``, integer, of each call, with the leading dims of
            the layer's input, ``(B, S)`` in a language model. -1 in all slots of a token: its route is not known, see
            `maxmoe.replay_routing`. -2: the slot computes nothing, as padding and what the router has dropped.
    """

    calls: Mapping[str, list[Tensor]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the number of calls of each layer and the shapes of their ids."""
        layers = []
        for path, calls in self.calls.items():
            shapes = dict.fromkeys(f"{[*ids.shape]}" for ids in calls)
            layers.append(f"{path!r}: {len(calls)} calls {', '.join(shapes)}".rstrip())
        return f"{type(self).__name__}({'; '.join(layers)})"

    def __len__(self) -> int:
        """Return the largest number of calls of a layer."""
        return max(map(len, self.calls.values()), default=0)

    def __getitem__(self, calls: slice) -> "RoutingRecord":
        """Select calls: ``record[-1:]`` has the last call of every layer."""
        return RoutingRecord({path: ids[calls] for path, ids in self.calls.items()})

    def joined(self) -> "RoutingRecord":
        """Join all calls to one along the sequence, such as prompt and generated tokens of a model with a cache.

        Every layer must be called once in a forward; raises ValueError if the layers have different numbers of calls.
        """
        counts = {path: len(ids) for path, ids in self.calls.items()}
        if len({*counts.values()}) > 1:
            raise ValueError(f"the layers of the record must have the same number of calls, got {counts}")
        return RoutingRecord({path: [torch.cat(ids, dim=-2)] for path, ids in self.calls.items() if ids})

    def save(self, path: str | Path) -> None:
        """Write the record to a file, which is replaced."""
        with replacing(path) as new:
            torch.save({layer: list(ids) for layer, ids in self.calls.items()}, new)

    @classmethod
    def load(cls, path: str | Path) -> "RoutingRecord":
        """Read a record that `save` wrote, to the CPU, without executing code from it (``weights_only=True``)."""
        calls: Any = torch.load(path, weights_only=True, map_location="cpu")
        is_record = isinstance(calls, dict) and all(
            isinstance(layer, str) and isinstance(ids, list) and all(isinstance(one, Tensor) for one in ids)
            for layer, ids in calls.items()
        )
        if not is_record:
            raise ValueError(f"{path} must be a record of routing: lists of tensors by the paths of layers")
        return cls(calls)

    @classmethod
    def from_array(
        cls,
        experts: Any,
        layers: Sequence[str | None],
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        padding_side: Literal["right", "left"] = "right",
        sentinel: int = -1,
    ) -> "RoutingRecord":
        """Read the experts that an inference server reports, in one array for all layers, as a record of one call.

            calls[layers[i]][0][b, s] = experts[cu_seqlens[b] + s, i]

        vLLM and SGLang return such an array for each request. It has a row for every token that was computed: for all
        but the last generated one::

            record = RoutingRecord.from_array(routed_experts, [None, "model.layers.1.mlp", "model.layers.2.mlp"])
            with maxmoe.replay_routing(model, record):
                model(tokens[:, :-1])

        Args:
            experts: ``(tokens, layers, K)``, or ``(B, S, layers, K)`` for a padded batch, integer, numpy array or
                tensor, expert ids.
            layers: for each index of the dim of layers, the path of the MoE layer in the model, or None for a layer
                that is left out: a dense one, or one of multi-token prediction. Layers that share one bank of experts
                have one path, whose calls are in the order of the layers.
            cu_seqlens: ``(B + 1,)``, integer, rising from 0 to the number of tokens, where sequences that follow each
                other begin and end. They become a padded batch ``(B, S)``. None for one sequence, ``(1, tokens)``,
                such as a packed batch.
            padding_side: side of the padding with `cu_seqlens`, "right" or "left".
            sentinel: id that stands for a slot whose route is not known, such as padding or a cached prefix. It becomes
                -1. Padding that `cu_seqlens` adds becomes -2.

        Returns:
            Record with the ids ``(B, S, K)``, int32, of each layer in `layers`, on the device of `experts`.

        Raises:
            ValueError: for other dims or dtypes, `layers` without a path, `cu_seqlens` that do not fit, a negative
                id other than the sentinel, an id that int32 cannot hold, and a token with the same expert twice in a
                layer, as in an array whose dims have another order or in the zeros of a dense layer. `replay_routing`
                checks layers, top_k, the range of the ids and the number of tokens.

        Source: arXiv:2510.11370.
        """
        ids = experts if isinstance(experts, Tensor) else torch.tensor(experts)
        if not {*layers} - {None}:
            raise ValueError(f"layers must have the path of each MoE layer, got {[*layers]}")
        _check_array(ids, len(layers))
        is_token = None
        if cu_seqlens is not None:
            is_token = _token_places(cu_seqlens, padding_side).to(ids.device)
            if ids.shape[:-2] != (num_tokens := int(is_token.sum()),):
                raise ValueError(
                    f"cu_seqlens up to {num_tokens} need experts of shape [{num_tokens}, layers, K], "
                    f"got {(*ids.shape,)}"
                )
        calls: dict[str, list[Tensor]] = {}
        for path, of_layer in zip(layers, ids.unbind(-2), strict=True):  # one by one: sorting needs memory
            if path is not None:
                checked = _checked_ids(of_layer, path, sentinel)
                if is_token is not None:
                    checked = _padded(checked, is_token)
                calls.setdefault(path, []).append(checked if checked.dim() == 3 else checked.unsqueeze(0))
        return cls(calls)

    def to_array(
        self,
        layers: Sequence[str | None] | None = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        padding_side: Literal["right", "left"] = "right",
        sentinel: int = -1,
    ) -> Tensor:
        """Return the expert ids of a record of one call in one array, which `from_array` reads.

        Args:
            layers: path of the layer for each index of the dim of layers, as in `from_array`; None for a layer that has
                the sentinel for all ids. By default all layers of the record, in its order.
            cu_seqlens: ``(B + 1,)``, integer, as in `from_array`: the tokens of a padded batch without the padding.
            padding_side: side of the padding with `cu_seqlens`, "right" or "left".
            sentinel: id that stands for a slot without an expert.

        Returns:
            ``(..., S, layers, K)``, int32; with `cu_seqlens` ``(tokens, layers, K)``.

        Raises:
            ValueError: for a record of several calls (see `joined`), other layers than in the record, layers whose ids
                have different shapes, and `cu_seqlens` that do not fit.
        """
        layers = [*self.calls] if layers is None else layers
        if {*layers} - {None} != {*self.calls} or not self.calls:
            raise ValueError(f"layers must have all layers of the record {[*self.calls]}, got {[*layers]}")
        shapes = {path: [(*ids.shape,) for ids in calls] for path, calls in self.calls.items()}
        counts, first = Counter(layers), next((shape for of_layer in shapes.values() for shape in of_layer), ())
        if any(of_layer != [first] * counts[path] for path, of_layer in shapes.items()):
            raise ValueError(
                "the layers of the record must have one call of the same shape for each time that layers names them, "
                f"got {shapes} for {[*layers]}"
            )
        of_layers = {path: iter(calls) for path, calls in self.calls.items()}
        absent = next(iter(self.calls.values()))[0].new_full(first, -1)
        parts = [absent if path is None else next(of_layers[path]) for path in layers]
        ids = torch.stack([part.to(torch.int32) for part in parts], dim=-2)
        if cu_seqlens is not None:
            is_token = _token_places(cu_seqlens, padding_side).to(ids.device)
            if ids.shape[:-2] != is_token.shape:
                raise ValueError(
                    f"cu_seqlens of a batch {(*is_token.shape,)} need ids of shape {(*is_token.shape, 'K')}, got "
                    f"{first}"
                )
            ids = ids[is_token]
        return ids.masked_fill(ids < 0, sentinel)


def is_integer(ids: Tensor) -> bool:
    """Return whether a tensor has an integer dtype, which bool is not."""
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def _check_array(ids: Tensor, num_layers: int) -> None:
    """Raise unless ids are integers with the dims of `RoutingRecord.from_array`."""
    if not is_integer(ids) or ids.dim() not in (3, 4) or ids.shape[-2] != num_layers:
        raise ValueError(
            f"experts must be integers of shape [tokens, layers ({num_layers}), K] or [B, S, layers ({num_layers}), K],"
            f" got {ids.dtype} of shape {(*ids.shape,)}"
        )


def _checked_ids(ids: Tensor, path: str, sentinel: int) -> Tensor:
    """Return the ids ``(..., K)`` of a layer, int32, -1 for the sentinel; raise for ids that no router has selected."""
    ids = ids.to(torch.int64)
    ids = ids.masked_fill(ids == sentinel, -1)
    if ids.numel() and int(ids.min()) < -1:
        raise ValueError(f"the ids of {path} must be at least 0 or the sentinel ({sentinel}), got {int(ids.min())}")
    if ids.numel() and int(ids.max()) > torch.iinfo(torch.int32).max:  # the conversion below would wrap around
        raise ValueError(f"the ids of {path} must be below 2**31, got {int(ids.max())}")
    ordered = ids.sort(-1).values
    is_repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    if is_repeated.any():
        token = tuple(is_repeated.nonzero()[0].tolist())
        raise ValueError(
            f"the experts of a token must differ, got {ids[token].tolist()} for token {[*token]} of {path}: the dims "
            "must be [tokens, layers, K], and the path of a dense layer None"
        )
    return ids.to(torch.int32)


def _padded(ids: Tensor, is_token: Tensor) -> Tensor:
    """Return ids ``(tokens, K)`` at the places ``(B, S)`` of the tokens, no expert elsewhere."""
    padded = ids.new_full((*is_token.shape, ids.shape[-1]), NO_EXPERT)
    padded[is_token] = ids
    return padded


def _token_places(cu_seqlens: Sequence[int] | Tensor, padding_side: str) -> Tensor:
    """Return where a padded batch ``(B, S)`` has tokens, bool."""
    ends = torch.as_tensor(cu_seqlens).cpu()
    if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0, one number more than there are sequences, got {ends.tolist()}")
    if padding_side not in ("right", "left"):
        raise ValueError(f"padding_side must be 'right' or 'left', got {padding_side!r}")
    lengths = ends.diff()
    place = torch.arange(int(lengths.max()))
    return (place if padding_side == "right" else place.flip(0)) < lengths.unsqueeze(1)
