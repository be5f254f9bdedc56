"""What training steps compute, measured in one process and on a rank: loss, outputs, parameters, gradients."""

import functools
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maxmoe._torch import TorchDispatchMode, process_groups
from maxmoe.testing.batches import map_tensors
from maxmoe.testing.layout import Entries
from maxmoe.testing.module_outputs import CallsOfModules, Outputs, outputs_of, recorded

WHOLE = "loss"  # name of the loss if it has no terms
ADDED = "added in the backward"  # name of the gradient that the backward adds beside the loss


@dataclass(frozen=True)
class Training:
    """The functions of the user, see `compare_ranks`."""

    build_model: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module], Any]
    make_batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
    step: Callable[[Any, Any], Tensor | Mapping[str, Tensor] | None] | None = None
    make_update: Callable[[Any], Callable[[], object]] | None = None
    steps: int = 1
    vary_constants: bool = True  # see _vary_constants
    has_dropout: bool = True
    records_modules: bool = False  # keep the outputs of all modules

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs."""
        return nullcontext() if self.has_dropout else WithoutDropout()  # type: ignore[no-untyped-call]


@dataclass
class ParameterEntries:
    """Value of a parameter before the step, and its gradient after it."""

    value: Entries
    gradient: Entries | None
    requires_grad: bool


@dataclass
class Measurement:
    """What a step computes in one process or on one rank."""

    loss: dict[str, float]  # terms of the loss; empty if the step returns none
    outputs: list[Outputs]  # floating-point tensors that the model returns, by name, for each call
    parameters: dict[str, ParameterEntries]  # in the order of their gradients in the backward, others last
    buffers: dict[str, dict[str, Entries]]  # "before" and "after" the step, by name
    batch: Any
    groups: dict[str, list[int]] = field(default_factory=dict)  # ranks of each process group of this rank
    random_state: int = 0  # checksum of torch's random state that `parallelize` left
    narrow: tuple[torch.dtype, str] | None = None  # dtype below the parameters' in which a function computes, its name
    modules: CallsOfModules = field(default_factory=dict)  # outputs of modules, if the training records them

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all parameters, zeros for those without one."""
        return {
            name: torch.zeros_like(item.value.values) if item.gradient is None else item.gradient.values
            for name, item in self.parameters.items()
        }


def measure_one_process(training: Training, dtype: torch.dtype) -> tuple[list[Measurement], Measurement]:
    """Run the steps in one process, and the first one again with other random numbers."""
    steps = _measure_steps(training, build(training, 0, dtype), dtype)
    model = build(training, 0, dtype)
    with NarrowResults(dtype) as narrow:
        (again,) = _measure_steps(replace(training, steps=1), model, dtype, seed=1)
    steps[0].narrow = narrow.found
    return steps, again


def measure_rank(training: Training, dtype: torch.dtype) -> list[Measurement]:
    """Run the steps on this rank."""
    rank = dist.get_rank()
    model = training.parallelize(build(training, rank, dtype))
    if not hasattr(model, "named_parameters"):
        got = "None" if model is None else type(model).__name__
        raise ValueError(f"parallelize must return the model, got {got}")
    random_state = zlib.crc32(bytes(torch.get_rng_state().tolist()))
    steps = _measure_steps(training, model, dtype, seed=rank)
    return [replace(step, groups=process_groups(), random_state=random_state) for step in steps]


def gradients_of_terms(
    training: Training, dtype: torch.dtype, batches: list[Any]
) -> list[dict[str, dict[str, Tensor]]]:
    """Return the gradients of all parameters in the last step of one process, for each batch, by term of the loss.

    A backward may add gradients that do not depend on the loss: of an auxiliary loss, as in `MoEFeedForward`. They
    are what is left of a loss times zero, and are returned as the term ADDED.
    """
    model = build(training, 0, dtype)
    _measure_steps(training, model, dtype)
    with training.mode():
        return [_gradients_of_batch(training, model, batch) for batch in batches]


def _gradients_of_batch(training: Training, model: nn.Module, batch: Any) -> dict[str, dict[str, Tensor]]:
    _seed(0)
    terms = terms_of(training.loss(model, batch))
    added = _gradients_of(model, 0 * _total(terms))
    gradients = {name: _gradients_of(model, term) for name, term in terms.items()}
    if any(gradient.any() for gradient in added.values()):
        for name, term in terms.items():
            for parameter, gradient in _gradients_of(model, 0 * term).items():
                gradients[name][parameter] -= gradient
        gradients[ADDED] = added
    return gradients


def build(training: Training, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the model on the CPU, with the seed of a rank."""
    _seed(seed)
    model = training.build_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_model must return a torch.nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise TypeError(f"build_model must return a model without complex parameters, got {name}")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # Module.to would make complex buffers real
            tensor.data = tensor.data.to(dtype)
    if training.vary_constants:
        _vary_constants(model)
    return model


def make_batch(training: Training, rank: int, num_ranks: int, dtype: torch.dtype) -> Any:
    """Make the batch of a rank, with the same seed on all ranks."""
    _seed(0)
    batch = map_tensors(
        lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        training.make_batch(rank, num_ranks),
    )
    try:
        pickle.dumps(batch)
    except Exception as error:
        raise TypeError(f"make_batch must return what pickle can send to other processes: {error}") from None
    return batch


def _seed(seed: int) -> None:
    """Seed torch, Python, and NumPy if there is one."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _vary_constants(model: nn.Module) -> None:
    """Add small numbers, the same ones in all processes, to trained parameters that are zero or repeat their values.

    Otherwise nothing tells which part of a bias of zeros a rank has, and the gradients of the factors of LoRA, of which
    one is zero, are not compared.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (not parameter.any() or 2 * len(torch.unique(parameter)) <= parameter.numel()):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = 0.02 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += noise.to(parameter.dtype)


def terms_of(loss: Any, function: str = "loss") -> dict[str, Tensor]:
    """Return the terms of a loss by name; `function` is the one that has returned it."""
    terms = dict(loss) if isinstance(loss, Mapping) else {WHOLE: loss}
    if not terms:
        raise ValueError(f"{function} must return a scalar tensor, or a dict of them, got an empty dict")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.numel() != 1:
            got = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
            raise ValueError(f"{function} must return a scalar tensor, or a dict of them, got {got} for {name!r}")
    return terms


class NarrowResults(TorchFunctionMode):
    """Mode that finds the first result with a gradient whose floating-point dtype is narrower than a given one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.found: tuple[torch.dtype, str] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and look at its result."""
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.requires_grad
                and value.dtype.itemsize < (self.found[0] if self.found else self.dtype).itemsize
            ):
                self.found = value.dtype, getattr(function, "__name__", str(function))
        return result


class WithoutDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every entry of a dropout mask is its mean, so that dropout changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fill masks with their probability instead of drawing them; call other operators as they are."""
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        return function(*args, **(kwargs or {}))


def _measure_steps(training: Training, model: Any, dtype: torch.dtype, seed: int = 0) -> list[Measurement]:
    """Run the steps in one process or on this rank, with an update between two of them."""
    on_rank = dist.is_initialized()
    place = (dist.get_rank(), dist.get_world_size()) if on_rank else (0, 1)
    has_backward = on_rank and training.step is not None
    run: Any = training.step if has_backward else training.loss
    found: list[Measurement] = []
    with training.mode():
        update: Any = training.make_update(model) if training.make_update else None
        if training.make_update and not callable(update):
            raise TypeError(f"make_update must return a function, got {type(update).__name__}")
        for number in range(training.steps):
            if number:
                update()
            batch = make_batch(training, *place, dtype)
            with _recorder(training, model) as modules:
                measured = _measure(model, run, batch, seed=seed + number, has_backward=has_backward)
            found.append(replace(measured, modules=modules))
    return found


def _recorder(training: Training, model: Any) -> AbstractContextManager[CallsOfModules]:
    """Return the context that records the outputs of modules, if the training asks for them."""
    return recorded(model) if training.records_modules and isinstance(model, nn.Module) else nullcontext({})


def _measure(
    model: Any, step: Callable[[Any, Any], Any], batch: Any, *, seed: int, has_backward: bool = False
) -> Measurement:
    """Run a step and measure it; without `has_backward`, `step` is the loss."""
    values = {name: Entries.of(parameter) for name, parameter in model.named_parameters()}
    buffers = {"before": _buffers_of(model)}
    outputs: list[Outputs] = []
    order: dict[str, None] = {}  # of the parameters in the backward
    recorded = map_tensors(lambda _, tensor: tensor.detach().clone(), batch)  # the step may change the batch
    handles: list[Any] = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.setdefault(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not dist.is_initialized()
    ]
    if isinstance(model, nn.Module):
        handles.append(model.register_forward_hook(lambda *call: outputs.append(outputs_of(call[2]))))
    _seed(seed)
    loss = step(model, batch)
    terms = {} if loss is None and has_backward else terms_of(loss, "step" if has_backward else "loss")
    if not has_backward:
        _total(terms).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    parameters = dict(model.named_parameters())
    names = [*order, *(name for name in reversed(parameters) if name not in order)]
    return Measurement(
        loss={name: float(Entries.of(term).values) for name, term in terms.items()},
        outputs=outputs,
        parameters={
            name: ParameterEntries(
                values.get(name) or Entries.of(parameters[name]),
                None if (gradient := parameters[name].grad) is None else Entries.of(gradient),
                parameters[name].requires_grad,
            )
            for name in names
        },
        buffers={**buffers, "after": _buffers_of(model)},
        batch=recorded,
    )


def update_between(before: Measurement, after: Measurement) -> Measurement:
    """Return the measurement before the update, with the change of each parameter in the place of its gradient."""

    def updated(name: str, item: ParameterEntries) -> ParameterEntries:
        added = after.parameters[name].value.values - item.value.values
        return replace(item, gradient=replace(item.value, values=added))

    parameters = {name: updated(name, item) for name, item in before.parameters.items()}
    return replace(before, loss={}, outputs=[], parameters=parameters)


def _buffers_of(model: Any) -> dict[str, Entries]:
    named = model.named_buffers() if isinstance(model, nn.Module) else ()
    return {name: Entries.of(buffer) for name, buffer in named}


def _total(terms: Mapping[str, Tensor]) -> Tensor:
    loss = functools.reduce(torch.add, terms.values())
    if not loss.requires_grad:
        raise ValueError("loss must depend on parameters that require a gradient, got one without a gradient")
    return loss


def _gradients_of(model: nn.Module, term: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a term in one process, zeros for parameters without one."""
    model.zero_grad()
    if term.requires_grad:
        term.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else Entries.of(parameter.grad).values
        for name, parameter in model.named_parameters()
    }
