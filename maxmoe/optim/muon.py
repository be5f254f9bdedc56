"""Muon for matrices and stacks of matrices, AdamW for all other parameters, in one optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from maxmoe.checks.fields import nearest
from maxmoe.declaration import FusedGate
from maxmoe.optim.distributed_newton_schulz import (
    DistributedNewtonSchulz,
    ShardedParameter,
    distributed_newton_schulz,
)
from maxmoe.optim.newton_schulz import QUINTIC, Coefficients, Matrix, fast_dtype, orthogonalize, steps_of

MUON = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", *Matrix._fields)
OPTIONS = {"muon": ("lr", "weight_decay", *MUON), "adamw": ("lr", "weight_decay", "betas", "eps")}
NS_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
COMMON = ("params", "param_names", "algorithm", "initial_lr")
CHOICES = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
    "input_dim": (-1, -2),
    "fused_gate": (None, *get_args(FusedGate)),
}


class Muon(torch.optim.Optimizer):
    """Muon, with AdamW for the parameters that are not matrices.

        B = mu B + (1 - mu) g,   U = NS(mu B + (1 - mu) g)   (Nesterov; else NS(B))
        w = (1 - lr weight_decay) w - lr s U,   s = sqrt(max(1, out / in))

    Options have the names and defaults of `torch.optim.Muon`; for 2-D parameters, results are bitwise equal. A
    parameter with more dims is a stack of matrices, orthogonalised by batched products. Parameters may be DTensors with
    any sharding. Whole matrices are orthogonalised on every rank that holds them. A sharded matrix is gathered on one
    rank, its owner, orthogonalised there and scattered again.

    Args:
        params: groups from `parameter_groups`, or matrices ``[out, in]`` as for `torch.optim.Muon`. The keys of a
            group: algorithm ("muon" or "adamw"); for Muon the options below and the fields of `Matrix`; for AdamW lr,
            weight_decay, betas and eps.
        lr: learning rate of both algorithms, for groups without their own.
        weight_decay: weight decay of both algorithms, for groups without their own.
        momentum: mu.
        ns_coefficients: a, b, c of the polynomial, or such a triple for each step, the last one repeated; or "quintic"
            (the default) or "polar_express".
        eps: smallest norm that a matrix is divided by.
        adjust_lr_fn: s: "original" as above; "match_rms_adamw" for 0.2 sqrt(max(out, in)), with the lr of AdamW.
        ns_dtype: dtype of Newton-Schulz; None for bfloat16 if the device multiplies it, else float32.

    Raises:
        ValueError: for an unknown key of a group, with the most similar keys; for values out of range; for parameters
            that are not matrices; if no parameter is for Muon.

    Example:
        ``optimizer = Muon(parameter_groups(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")``

    Source: https://kellerjordan.github.io/posts/muon; arXiv:2502.16982.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        if ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype must be one of {NS_DTYPES}, got {ns_dtype!r}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,  # of the optimizer, not of its groups: torch's full state dicts refuse dtypes
        }
        super().__init__(params, defaults)
        if all(group["algorithm"] == "adamw" for group in self.param_groups):
            names = [name for group in self.param_groups for name in group.get("param_names", ())]
            raise ValueError(
                f"Muon got no matrices, only parameters for AdamW: {', '.join(names[:8]) or 'without names'}"
                f"{', ...' if len(names) > 8 else ''}. Use torch.optim.AdamW, or choose matrices by the overrides of "
                "maxmoe.optim.parameter_groups"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters as in `params`, with defaults for the options that it lacks."""
        group = _complete_group(param_group, self.defaults)
        super().add_param_group(group)
        for key in self.defaults.keys() - OPTIONS[group["algorithm"]]:  # torch has added them
            del group[key]
        names = group.get("param_names", [None] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            name = name or f"a parameter of shape {tuple(parameter.shape)}"
            _check_parameter(name, parameter, group, is_stack="input_dim" in param_group)
        self._distributed: list[DistributedNewtonSchulz] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from a pickle or a state dict."""
        super().__setstate__(state)
        self._distributed = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that was saved on any mesh.

        Raises:
            ValueError: for the state of another model or optimizer; the optimizer is then unchanged.
        """
        _check_state_dict(self.param_groups, state_dict)
        super().load_state_dict({**state_dict})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the result of `closure`. All ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._init_state()
        if self._distributed is None:
            self._distributed = distributed_newton_schulz(
                ShardedParameter(parameter, _matrix(group), self._ns_dtype(parameter))
                for group in self.param_groups
                for parameter in group["params"]
                if group["algorithm"] == "muon" and isinstance(parameter, DTensor)
            )
        group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        distributed = {sharded.parameter for collective in self._distributed for sharded in collective.parameters}
        for collective in self._distributed:
            collective.start(lambda sharded: self._update(sharded.parameter, group_of[sharded.parameter]))
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                _adamw_step(group, self.state)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in distributed:
                    matrices = _matrix(group).views(self._update(parameter, group))
                    _apply(parameter, group, [_orthogonalized(each, group) for each in matrices])
        for collective in self._distributed:
            for sharded, update in collective.finish(
                lambda matrices, sharded: _orthogonalized(matrices, group_of[sharded.parameter])
            ):
                if sharded.parameter.grad is not None:
                    _apply(sharded.parameter, group_of[sharded.parameter], sharded.matrix.views(update))
        return loss

    def _init_state(self) -> None:
        """Create the state of all trained parameters, also if they have no gradient in the first step."""
        for group in self.param_groups:
            is_muon = group["algorithm"] == "muon"
            for parameter in group["params"]:
                if parameter not in self.state and (parameter.requires_grad or parameter.grad is not None):
                    # On the CPU, because AdamW reads the step number in every step.
                    self.state[parameter] = {} if is_muon else {"step": torch.tensor(0.0, dtype=torch.float32)}
                    for key in ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum of the local shard and return what is orthogonalised: zeros if there is no gradient."""
        dtype = self._ns_dtype(parameter)
        if parameter.grad is None:
            return torch.zeros_like(_local(parameter), dtype=dtype)
        gradient, momentum = _local_gradient(parameter), _local(self.state[parameter]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            return gradient.lerp(momentum, group["momentum"]).to(dtype)
        return momentum.to(dtype, copy=True)

    def _ns_dtype(self, parameter: Tensor) -> torch.dtype:
        dtype: torch.dtype = self.defaults["ns_dtype"] or fast_dtype(parameter.device)
        return dtype


def _matrix(group: Mapping[str, Any]) -> Matrix:
    return Matrix(group["input_dim"], group["fused_gate"])


def _orthogonalized(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    return orthogonalize(matrices, steps_of(group["ns_coefficients"], group["ns_steps"]), group["eps"])


def _apply(parameter: Tensor, group: Mapping[str, Any], updates: list[Tensor]) -> None:
    """Apply weight decay and the updates of the matrices to the local shard of a parameter."""
    lr, local = float(group["lr"]), _local(parameter)
    local.mul_(1 - lr * group["weight_decay"])
    num_outputs = parameter.shape[-3 - group["input_dim"]] // (1 if group["fused_gate"] is None else 2)
    num_inputs = parameter.shape[group["input_dim"]]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(num_outputs, num_inputs))
    else:
        scale = math.sqrt(max(1, num_outputs / max(num_inputs, 1)))
    for view, update in zip(_matrix(group).views(local), updates, strict=True):
        view.add_(update, alpha=-lr * scale)


def _adamw_step(group: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Update a group as `torch.optim.AdamW`: element by element on the local shards, without collectives."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    values, gradients = [*map(_local, parameters)], [*map(_local_gradient, parameters)]
    # The fused kernel reads memory once, but needs equal strides.
    fused = all(x.device.type == "cpu" and x.stride() == y.stride() for x, y in zip(values, gradients, strict=True))
    adamw(
        values,
        gradients,
        [_local(states[parameter]["exp_avg"]) for parameter in parameters],
        [_local(states[parameter]["exp_avg_sq"]) for parameter in parameters],
        [],
        [states[parameter]["step"] for parameter in parameters],
        fused=fused or None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, which shares its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of the local shard of a parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)


def _complete_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with all options of its algorithm, taken from `defaults` if the group lacks them; check them."""
    algorithm = group.get("algorithm", "muon")
    if algorithm not in OPTIONS:
        raise ValueError(f"algorithm must be one of {sorted(OPTIONS)}, got {algorithm!r}")
    known = (*COMMON, *OPTIONS[algorithm])
    for key in group:
        if key not in known:
            raise ValueError(f"a group of {algorithm} has no option {key!r}{nearest(key, known)}")
    own_defaults = {"betas": (0.9, 0.999), "eps": 1e-8} if algorithm == "adamw" else Matrix()._asdict()
    values = {**defaults, **own_defaults, **group, "algorithm": algorithm}
    options = {key: values[key] for key in known if key in values}
    for key, value in options.items():
        if key in ("lr", "weight_decay", "eps", "momentum") and not value >= 0:
            raise ValueError(f"{key} must be at least 0, got {value}")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"{key} must be one of {CHOICES[key]}, got {value!r}")
    if algorithm == "muon":
        steps_of(options["ns_coefficients"], options["ns_steps"])
    return options


def _check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any], *, is_stack: bool) -> None:
    """Raise unless the algorithm of a group can update a parameter, which may be a stack of matrices."""
    if not parameter.is_floating_point():
        raise ValueError(f"{name} must be floating and real, got {parameter.dtype}")
    if group["algorithm"] == "adamw":
        return
    shape = tuple(parameter.shape)
    if len(shape) < 2 or (len(shape) > 2 and not is_stack):
        raise ValueError(
            f"{name} must be a matrix, got the shape {shape}; stacks of matrices need input_dim in their group, other "
            "parameters algorithm='adamw': maxmoe.optim.parameter_groups makes such groups"
        )
    if group["fused_gate"] is not None and shape[-3 - group["input_dim"]] % 2:
        raise ValueError(f"{name} must have an even number of outputs for gate and up, got the shape {shape}")


def _check_state_dict(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise unless a state dict was saved for the same parameters, algorithms and shapes.

    With moments of another shape, torch's fused AdamW reads memory that is not theirs.
    """
    saved = state_dict["param_groups"]
    foreign = next((group for group in saved if "algorithm" not in group), None)
    if foreign is not None:
        raise ValueError(
            f"the state dict must be of maxmoe.optim.Muon, got one of an optimizer with the options "
            f"{sorted(set(foreign) - {'params', 'param_names'})}: the state of AdamW and the state of Muon cannot "
            "replace each other; load the model alone"
        )
    ours, theirs = (
        [
            (group["algorithm"], name)
            for group in found
            for name in group.get("param_names", range(len(group["params"])))
        ]
        for found in (groups, saved)
    )
    if ours != theirs:
        raise ValueError(
            f"the state dict must have the parameters of the optimizer in their order, got {len(theirs)} instead of "
            f"{len(ours)}; only one of them has {', '.join(sorted(map(str, {*ours} ^ {*theirs}))[:8]) or 'none'}"
        )
    parameters, keys = ([each for group in found for each in group["params"]] for found in (groups, saved))
    for (_, name), parameter, key in zip(ours, parameters, keys, strict=True):
        for field, value in state_dict["state"].get(key, {}).items():
            if field != "step" and value.shape != parameter.shape:
                raise ValueError(
                    f"{field} of the parameter {name} must have its shape {tuple(parameter.shape)}, got "
                    f"{tuple(value.shape)}"
                )
