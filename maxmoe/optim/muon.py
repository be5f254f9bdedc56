"""Muon for matrices and stacks of them, AdamW for all other parameters, in one optimizer."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from maxmoe.optim.adamw import adamw_step, init_adamw_state
from maxmoe.optim.exchange import Exchange, Sharded, exchanges_of
from maxmoe.optim.group_options import OPTIONS, complete
from maxmoe.optim.local import local_gradient, local_part
from maxmoe.optim.matrix import Matrix
from maxmoe.optim.newton_schulz import QUINTIC, Coefficients, fast_dtype, orthogonalize, steps_of
from maxmoe.optim.state_dict import check_state_dict


class Muon(torch.optim.Optimizer):
    """Muon, with AdamW for the parameters that are no matrices.

        B = mu B + (1 - mu) g,   U = NS(mu B + (1 - mu) g)   (Nesterov; else NS(B))
        w = (1 - lr weight_decay) w - lr s U,   s = sqrt(max(1, out / in))

    With the names and defaults of `torch.optim.Muon`, and the same bits for 2-D parameters. A parameter of more dims is
    a stack of matrices, orthogonalised as batched products. Parameters may be DTensors, sharded in any way: a rank that
    holds whole matrices orthogonalises them where they are; the others are gathered, each on one rank; see `Exchange`.

    Args:
        params: from `parameter_groups`, or matrices ``[out, in]`` as for `torch.optim.Muon`. The keys of a group:
            algorithm ("muon" or "adamw"); for Muon the options below and those of `Matrix`; for AdamW lr,
            weight_decay, betas and eps.
        lr: of both algorithms, unless a group has its own.
        weight_decay: likewise.
        momentum: mu.
        nesterov: whether the gradient counts again.
        ns_coefficients: a, b, c of the polynomial, or such triples for each step, the last one repeated; or "quintic",
            the default, or "polar_express".
        eps: the smallest norm that a matrix is divided by.
        ns_steps: of Newton-Schulz.
        adjust_lr_fn: s: "original" as above; "match_rms_adamw", 0.2 sqrt(max(out, in)), for the lr of AdamW.
        ns_dtype: of Newton-Schulz; None for bfloat16 where the device multiplies it, else float32.

    Raises:
        ValueError: for an unknown key of a group, with the nearest; for values out of range; for parameters that are
            no matrices; if no parameter is for Muon.

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
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
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
        """Add a group, with the defaults for what it lacks.

        Args:
            param_group: see `params` of the class.

        Raises:
            ValueError: for unknown keys, values out of range and parameters that are no matrices.
        """
        group = complete(param_group, self.defaults)
        super().add_param_group(group)
        for key in self.defaults.keys() - OPTIONS[group["algorithm"]]:  # which torch has added
            del group[key]
        names = group.get("param_names", [None] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            _check_parameter(name or f"a parameter of shape {tuple(parameter.shape)}", parameter, group, param_group)
        self._exchanges: list[Exchange] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `torch.save` or a state dict has kept."""
        super().__setstate__(state)
        self._exchanges = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, on any mesh.

        Args:
            state_dict: of this class, for a model with the same parameters.

        Raises:
            ValueError: for the state of another model or optimizer, with the names; nothing has changed then.
        """
        check_state_dict(self.param_groups, state_dict)
        super().load_state_dict({**state_dict})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. On a mesh all ranks call it.

        Args:
            closure: computes the loss again.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._init_state()
        if self._exchanges is None:
            self._exchanges = exchanges_of(self._sharded())
        options = {parameter: group for group in self.param_groups for parameter in group["params"]}
        sharded = {item.parameter for exchange in self._exchanges for item in exchange.items}
        for exchange in self._exchanges:
            exchange.start(lambda item: self._update(item.parameter, options[item.parameter]))
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                adamw_step(group, self.state)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in sharded:
                    update = self._update(parameter, group)
                    _apply(parameter, group, [_orthogonalized(view, group) for view in _matrix(group).views(update)])
        for exchange in self._exchanges:
            for item, update in exchange.finish(
                lambda matrices, item: _orthogonalized(matrices, options[item.parameter])
            ):
                if item.parameter.grad is not None:
                    _apply(item.parameter, options[item.parameter], item.matrix.views(update))
        return loss

    def _init_state(self) -> None:
        """Of all parameters that are trained, also of those without a gradient in the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state and (parameter.requires_grad or parameter.grad is not None):
                    self.state[parameter] = (
                        init_adamw_state(parameter)
                        if group["algorithm"] == "adamw"
                        else {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
                    )

    def _sharded(self) -> list[Sharded]:
        """The DTensors for Muon."""
        return [
            Sharded(parameter, _matrix(group), _dtype(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if group["algorithm"] == "muon" and isinstance(parameter, DTensor)
        ]

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Move the momentum on; return what is orthogonalised of this rank's part, zeros without a gradient."""
        dtype = _dtype(parameter, group)
        if parameter.grad is None:
            return torch.zeros_like(local_part(parameter), dtype=dtype)
        gradient, momentum = local_gradient(parameter), local_part(self.state[parameter]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            return gradient.lerp(momentum, group["momentum"]).to(dtype)
        return momentum.to(dtype, copy=True)


def _check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if not parameter.is_floating_point():
        raise ValueError(f"{name} must be floating and real, got {parameter.dtype}")
    if group["algorithm"] == "adamw":
        return
    shape = tuple(parameter.shape)
    if len(shape) < 2 or (len(shape) > 2 and "input_dim" not in given):
        raise ValueError(
            f"{name} must be a matrix, got the shape {shape}; stacks of matrices need input_dim, and other parameters "
            "algorithm='adamw', in their group: see maxmoe.optim.parameter_groups"
        )
    if group["fused_gate"] is not None and shape[-3 - group["input_dim"]] % 2:
        raise ValueError(f"{name} must have an even number of outputs for gate and up, got the shape {shape}")


def _matrix(group: Mapping[str, Any]) -> Matrix:
    return Matrix(group["input_dim"], group["fused_gate"])


def _dtype(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = group["ns_dtype"] or fast_dtype(parameter.device)
    return dtype


def _orthogonalized(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    return orthogonalize(matrices, steps_of(group["ns_coefficients"], group["ns_steps"]), group["eps"])


def _apply(parameter: Tensor, group: Mapping[str, Any], updates: list[Tensor]) -> None:
    """Decay this rank's part of a parameter, and add the updates of its matrices."""
    lr, part = float(group["lr"]), local_part(parameter)
    part.mul_(1 - lr * group["weight_decay"])
    num_outputs = parameter.shape[-3 - group["input_dim"]] // (1 if group["fused_gate"] is None else 2)
    adjusted = lr * _adjustment(group["adjust_lr_fn"], num_outputs, parameter.shape[group["input_dim"]])
    for view, update in zip(_matrix(group).views(part), updates, strict=True):
        view.add_(update, alpha=-adjusted)


def _adjustment(adjust_lr_fn: str | None, num_outputs: int, num_inputs: int) -> float:
    """The factor s of the class."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_outputs, num_inputs))
    return math.sqrt(max(1, num_outputs / max(num_inputs, 1)))
