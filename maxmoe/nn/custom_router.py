"""Checks of what custom routers return."""

import torch
from torch import Tensor, nn

from maxmoe._torch import assert_async
from maxmoe.config import MoEConfig
from maxmoe.nn.routing import Routing
from maxmoe.recompute.selective import choices_are_kept


def checked_routing(
    router: nn.Module, config: MoEConfig, x: Tensor, token_mask: Tensor | None, given: Tensor | None
) -> Routing:
    """Call a custom router, and raise as `check_routing` if its output does not fit the layer.

    Args:
        router: the router.
        config: config of the layer.
        x: ``(B, S, D)``, tokens.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.
        given: ``(T, K)``, int64, experts of a replay; None to let the router choose.
    """
    with choices_are_kept():
        routing: Routing = router(x, token_mask) if given is None else router(x, token_mask, experts=given)
    check_routing(routing, config, x, token_mask, router)
    if given is not None:
        _check_is_replayed(routing, given, type(router).__name__)
    return routing


def check_routing(routing: object, config: MoEConfig, x: Tensor, token_mask: Tensor | None, router: nn.Module) -> None:
    """Raise for the output of a custom router that does not fit the layer.

    Args:
        routing: output of the router.
        config: config of the layer.
        x: ``(B, S, D)``, tokens, the input of the router.
        token_mask: ``(T,)``, bool, the mask that the router was called with.
        router: the router.

    Raises:
        TypeError: for another type than `Routing`.
        ValueError: for other shapes or dtypes, ids outside [-1, E) or [0, E) if `is_unpadded`, values that are not
            finite, weights that need no gradient although the router is trained, and a mask that the router did not
            pass on. On devices other than the CPU, and in compiled code, wrong values are found by an assertion of the
            device, without the values.
    """
    name = type(router).__name__
    if not isinstance(routing, Routing):
        raise TypeError(f"router {name} must return maxmoe.nn.Routing, got {type(routing).__name__}: see Routing.of")
    top_k = {"top_k": config.top_k}
    num_experts = {"number of experts": config.num_selectable_experts}
    widths = {"experts": top_k, "weights": top_k, "probabilities": num_experts, "logits": num_experts}
    for field, width in {**widths, "token_losses": {}}.items():
        tensor = getattr(routing, field)
        if tensor is None:
            continue
        wanted = {"tokens": x.shape[:-1].numel(), **width}
        if tuple(tensor.shape) != (*wanted.values(),):
            sizes = ", ".join(f"{size} ({value})" for size, value in wanted.items())
            raise ValueError(f"{field} of router {name} must have shape ({sizes}), got {tuple(tensor.shape)}")
        dtypes = (torch.int64,) if field == "experts" else (torch.float32, torch.float64)
        if tensor.dtype not in dtypes:
            listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{field} of router {name} must be {listed}, got {tensor.dtype}: see Routing.of")
    if routing.token_mask is not token_mask:
        raise ValueError(f"router {name} must pass token_mask to Routing.of, so that padding is not routed")
    if config.router_z_loss_weight > 0 and routing.logits is None:
        raise ValueError(
            f"router_z_loss_weight ({config.router_z_loss_weight}) needs the logits of router {name}, got None"
        )
    is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in router.parameters())
    if is_trained and not routing.weights.requires_grad:
        raise ValueError(
            f"weights of router {name} must require a gradient, since its parameters do, got weights that do not: "
            "compute them from the scores, or freeze the router"
        )
    _check_values(routing, config, name)


def _check_values(routing: Routing, config: MoEConfig, name: str) -> None:
    """Raise for ids out of range and values that are not finite."""
    experts, least = routing.experts, 0 if routing.is_unpadded else -1
    ids = f"expert ids of router {name} must be in [-1, number of experts ({config.num_selectable_experts}))"
    if experts.numel() == 0:
        return
    is_async = experts.device.type != "cpu" or torch.compiler.is_compiling()
    if is_async:
        assert_async(((experts >= least) & (experts < config.num_selectable_experts)).all(), ids)
    else:
        low, high = (int(bound) for bound in experts.aminmax())
        if low < -1 or high >= config.num_selectable_experts:
            raise ValueError(f"{ids}, got {low if low < -1 else high}")
        if low < least:
            raise ValueError(f"router {name} must set is_unpadded=False for ids of -1, as Routing.of does, got True")
    for field in ("weights", "probabilities", "token_losses"):
        values, finite = getattr(routing, field), f"{field} of router {name} must be finite"
        if values is None:
            continue
        # One pass over the values; a sum is not finite if a summand is not.
        is_finite = values.detach().sum().isfinite()
        if is_async:
            assert_async(is_finite, finite)
        elif not is_finite:
            is_bad = ~values.detach().isfinite().flatten(1 if values.dim() > 1 else 0)
            token = int((is_bad.any(1) if values.dim() > 1 else is_bad).nonzero()[0])
            raise ValueError(f"{finite}, got {values[token].tolist()} for token {token}")


def _check_is_replayed(routing: Routing, given: Tensor, name: str) -> None:
    """Raise for a custom router that does not route to the `experts` of a record."""
    is_same = (routing.experts.sort(1).values == given.sort(1).values).all(1)
    if routing.token_mask is not None:
        is_same = is_same | ~routing.token_mask
    if is_same.device.type != "cpu" or torch.compiler.is_compiling():
        assert_async(is_same.all(), f"router {name} must route to the experts that it gets in a replay")
    elif not is_same.all():
        token = int((~is_same).nonzero()[0])
        raise ValueError(
            f"router {name} must route to the experts that it gets in a replay, {given[token].tolist()} for token "
            f"{token}, got {routing.experts[token].tolist()}"
        )
