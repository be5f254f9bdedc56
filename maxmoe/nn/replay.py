"""Recording and replay of the expert ids of MoE layers."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from maxmoe._torch import never_compiled
from maxmoe._torch.autograd import backward_id, checkpoint_frames, is_reentrant_checkpoint
from maxmoe._torch.wrappers import unwrapped_path
from maxmoe.config import MoEConfig
from maxmoe.nn.routing import NO_EXPERT, chooses_itself
from maxmoe.nn.routing_record import RoutingRecord, is_integer
from maxmoe.recompute.selective import is_recomputation


class RoutingLayer(Protocol):
    """Layer whose routing can be recorded and replayed: a `maxmoe.MoE`, or a layer of another library."""

    config: MoEConfig
    routing_hooks: tuple[Any, ...]


Finder: TypeAlias = Callable[[nn.Module], RoutingLayer | None]
# What happens to a token without a route in the record.
Missing = Literal["error", "natural", "zero"]

# Functions that know the layers of other libraries.
_finders: list[Finder] = []


def finds_routing_layers(finder: Finder) -> None:
    """Register a function that returns the routing layer for a module of another library, None for other modules."""
    _finders.append(finder)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the expert ids of all MoE layers of a model in every call, except recomputations.

        with maxmoe.record_routing(model) as record:
            model(tokens)

    As `torch.no_grad`, it applies to the calls of the thread that enters it, and so does `replay_routing`.

    Args:
        model: model with MoE layers, or a MoE layer.

    Yields:
        Record, to which every call appends. On a mesh, it has the expert ids of this rank's tokens.

    Raises:
        ValueError: for a model without MoE layers.
    """
    layers = _layers(model)
    record = RoutingRecord({path: [] for path in layers})
    with _hooked((layer, _Recorder(layer.config, record.calls[path])) for path, layer in layers.items()):
        yield record


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord, *, missing: Missing = "error") -> Iterator[None]:
    """Route tokens to the recorded experts, with routing weights from the current parameters.

    The router gets its gradient through the weights of the recorded experts. Each forward uses the next call of the
    record. A recomputation by `torch.utils.checkpoint` with ``use_reentrant=False`` uses the call of its forward, also
    after the end of the replay.

    Args:
        model: model with MoE layers at the same paths as in the record.
        record: record from `record_routing`, `RoutingRecord.load` or `RoutingRecord.from_array`; on a mesh, of this
            rank's tokens.
        missing: what happens to a token without a route, -1 in all slots, which is not padding of the call: "error";
            "natural": the router chooses its experts; "zero": the routed experts compute nothing for it.

    Yields:
        Nothing.

    Raises:
        ValueError: for a record of other layers, or with another top_k or unknown experts; in a call, for other
            leading dims than in the record, such as ``(S, B)``, for tokens without a route unless `missing` says
            otherwise, if the record has no more calls, for a router that selects other experts, or in a checkpoint with
            ``use_reentrant=True``; at the end, if the model was called less often than in the record.
    """
    if missing not in get_args(Missing):
        raise ValueError(f"missing must be one of {', '.join(get_args(Missing))}, got {missing!r}")
    layers = _layers(model)
    absent, unknown = sorted(layers.keys() - record.calls.keys()), sorted(record.calls.keys() - layers.keys())
    if absent or unknown:
        raise ValueError(f"the record must have the layers of the model: missing {absent}, unexpected {unknown}")
    replays = {path: _Replay(path, layer, record.calls[path], missing) for path, layer in layers.items()}
    with _hooked((replay.layer, replay) for replay in replays.values()):
        yield
    for replay in replays.values():
        replay.end()
    for path, replay in replays.items():
        if replay.num_calls != len(record.calls[path]):
            raise ValueError(f"the record has {len(record.calls[path])} calls of {replay.path}, got {replay.num_calls}")


class _Hook:
    """Observer of the calls of a layer's router in the thread that creates the observer.

    Leading dims are the leading dims of the layer's input.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def experts(self, _leading_dims: Sequence[int], _device: torch.device, _token_mask: Tensor | None) -> Tensor | None:
        """Return the expert ids ``(T, K)``, int64, as `maxmoe.nn.Router` takes them; None to let the router choose."""
        return None

    def observe(self, experts: Tensor, leading_dims: Sequence[int]) -> None:
        """See the expert ids ``(T, K)`` of a call."""


class _Recorder(_Hook):
    """Appends the expert ids of each call of a layer to a list."""

    def __init__(self, config: MoEConfig, calls: list[Tensor]) -> None:
        super().__init__()
        self._calls, self._top_k = calls, config.top_k
        is_narrow = config.num_selectable_experts <= torch.iinfo(torch.int16).max
        self._dtype = torch.int16 if is_narrow else torch.int32

    def observe(self, experts: Tensor, leading_dims: Sequence[int]) -> None:
        """Append the ids, unless the call is a recomputation."""
        if not is_recomputation():
            known = experts.detach().masked_fill(experts < 0, NO_EXPERT)
            self._calls.append(known.to(self._dtype).view(*leading_dims, self._top_k))


class _Replay(_Hook):
    """Recorded expert ids of one layer, and the ids that a recomputation in the backward pass may need again."""

    def __init__(self, path: str, layer: RoutingLayer, calls: list[Tensor], missing: Missing) -> None:
        self.path, self.layer, self.calls, self.num_calls = path or "the layer", layer, calls, 0
        self.missing = missing
        super().__init__()
        self.has_ended = False  # then only recomputations of its calls get expert ids
        self.checkpointed: WeakKeyDictionary[object, _CheckpointedCalls] = WeakKeyDictionary()  # by its frame
        for ids in calls:
            self._check(ids)

    def _check(self, ids: Tensor) -> None:
        config = self.layer.config
        if not is_integer(ids) or ids.dim() < 2 or ids.shape[-1] != config.top_k:
            raise ValueError(
                f"the ids of {self.path} must be integers of shape [..., S, top_k ({config.top_k})], "
                f"got {ids.dtype} of shape {tuple(ids.shape)}"
            )
        if ids.numel() and not NO_EXPERT <= int(ids.min()) <= int(ids.max()) < config.num_selectable_experts:
            raise ValueError(
                f"the ids of {self.path} must be in [-2, num_experts ({config.num_selectable_experts})), "
                f"got from {int(ids.min())} to {int(ids.max())}"
            )

    def experts(self, leading_dims: Sequence[int], device: torch.device, token_mask: Tensor | None) -> Tensor | None:
        """Return the recorded ids of the call that runs; None if this replay does not know it."""
        if self.has_ended and not self._is_known():
            return None
        ids = self._recomputed() if is_recomputation() else self._next()
        if ids is None:
            return None
        if ids.shape[:-1] != (*leading_dims,):
            raise ValueError(
                f"call {self.num_calls} of {self.path} has tokens of shape {(*leading_dims,)}, the record "
                f"{tuple(ids.shape[:-1])}"
            )
        return self._with_routes(ids.reshape(-1, ids.shape[-1]).to(torch.int64), leading_dims, token_mask).to(device)

    def _with_routes(self, ids: Tensor, leading_dims: Sequence[int], token_mask: Tensor | None) -> Tensor:
        """Return ids ``(T, K)`` in which -1 stands in all slots of a token, if the router chooses its experts."""
        is_missing = chooses_itself(ids)
        if token_mask is not None:
            is_missing &= token_mask.to(ids.device)
        if self.missing == "error" and is_missing.any():
            place = torch.unravel_index(is_missing.nonzero()[0, 0], tuple(leading_dims))
            raise ValueError(
                f"call {self.num_calls} of {self.path} has no route for {int(is_missing.sum())} of {len(ids)} tokens, "
                f"first for token {[int(index) for index in place]}: missing='natural' lets the router choose, "
                "missing='zero' computes nothing for them"
            )
        is_own = is_missing.unsqueeze(1) if self.missing == "natural" else False
        return ids.where((ids >= 0) | is_own, NO_EXPERT)

    def end(self) -> None:
        """Stay with the layer for recomputations after the context, until no checkpointed graph is left."""
        self.has_ended = True
        if self.checkpointed:
            _add_hook(self.layer, self)

    def _is_known(self) -> bool:
        """Return whether a call of this replay is recomputed; removes the replay if none can be."""
        if not self.checkpointed:
            _remove_hook(self.layer, self)
        return is_recomputation() and any(frame in self.checkpointed for frame in checkpoint_frames())

    def _next(self) -> Tensor:
        if self.num_calls == len(self.calls):
            raise ValueError(f"the record has {len(self.calls)} calls of {self.path}, got another one")
        if not torch.is_grad_enabled() and is_reentrant_checkpoint():
            raise ValueError(f"{self.path} cannot be replayed in a checkpoint with use_reentrant=True: set it to False")
        ids = self.calls[self.num_calls]
        self.num_calls += 1
        for frame in checkpoint_frames():
            self.checkpointed.setdefault(frame, _CheckpointedCalls()).ids.append(ids)
        return ids

    def _recomputed(self) -> Tensor | None:
        """Return the expert ids of the forward that is recomputed; None if this replay has not run it."""
        frames = checkpoint_frames()
        for frame in frames:  # the innermost may be new: the forward of a checkpoint in one that is recomputed
            if frame in self.checkpointed:
                return self.checkpointed[frame].next()
        if frames or is_reentrant_checkpoint():
            return None
        raise ValueError(
            f"{self.path} is recomputed, but the recorded call is not known: recompute with torch.utils.checkpoint and "
            "use_reentrant=False"
        )


@dataclass
class _CheckpointedCalls:
    """Expert ids of the calls of a layer in one checkpoint. A recomputation repeats all or the first of them."""

    ids: list[Tensor] = field(default_factory=list)
    num_recomputed: Counter[int] = field(default_factory=Counter)  # by backward

    def next(self) -> Tensor:
        """Return the expert ids of the next call that the running backward recomputes."""
        number = backward_id()
        self.num_recomputed[number] += 1
        return self.ids[self.num_recomputed[number] - 1]


def _layers(model: nn.Module) -> dict[str, RoutingLayer]:
    found = ((path, _routing_layer(module)) for path, module in model.named_modules())
    layers = {unwrapped_path(model, path): layer for path, layer in found if layer is not None}
    # A rank of a pipeline may have dense blocks only.
    if not layers and not hasattr(model, "layers_of_stages"):
        raise ValueError(
            f"{type(model).__name__} has no maxmoe.MoE layers, and no blocks of transformers with "
            'experts_implementation="maxmoe"'
        )
    return layers


def _routing_layer(module: nn.Module) -> RoutingLayer | None:
    # The type is asked, because wrappers forward attributes to the module that they wrap.
    own: Any = module if hasattr(type(module), "routing_hooks") else None
    found = (finder(module) for finder in _finders) if own is None else (own,)
    return next((layer for layer in found if layer is not None), None)


@contextmanager
def _hooked(hooks: Iterable[tuple[RoutingLayer, _Hook]]) -> Iterator[None]:
    """Add a hook to each layer in the context."""
    with ExitStack() as stack:
        for layer, hook in hooks:
            _add_hook(layer, hook)
            stack.callback(_remove_hook, layer, hook)
        yield


@never_compiled
def given_experts(
    hooks: Sequence[_Hook], leading_dims: Sequence[int], device: torch.device, token_mask: Tensor | None
) -> Tensor | None:
    """Return the expert ids of the last hook that gives any; None if the router chooses them."""
    given = [hook.experts(leading_dims, device, token_mask) for hook in _of_this_call(hooks)]
    return next((experts for experts in reversed(given) if experts is not None), None)


@never_compiled
def observe(hooks: Sequence[_Hook], experts: Tensor, leading_dims: Sequence[int]) -> None:
    """Show the expert ids ``(T, K)`` of a call to all hooks."""
    for hook in _of_this_call(hooks):
        hook.observe(experts, leading_dims)


def _of_this_call(hooks: Sequence[_Hook]) -> Sequence[_Hook]:
    """Return the hooks of this thread; in a recomputation all of them: autograd may run it in another thread."""
    if is_recomputation():
        return hooks
    thread = threading.get_ident()
    return [hook for hook in hooks if hook.thread == thread]


_hooks_change = threading.Lock()


def _add_hook(layer: RoutingLayer, hook: _Hook) -> None:
    """Add a hook to a layer, which other threads may call meanwhile."""
    with _hooks_change:
        layer.routing_hooks += (hook,)


def _remove_hook(layer: RoutingLayer, hook: _Hook) -> None:
    """Remove a hook from a layer, if it has it."""
    with _hooks_change:
        layer.routing_hooks = tuple(other for other in layer.routing_hooks if other is not hook)
