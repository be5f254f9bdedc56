"""Result of a router: the experts of each token, their weights, and what the losses read."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maxmoe._torch import assert_async
from maxmoe.config import MoEConfig
from maxmoe.recompute.selective import choices_are_kept


class TopK(NamedTuple):
    """Expert ids and routing weights of tokens.

    Attributes:
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
    """

    weights: Tensor
    experts: Tensor
    is_unpadded: bool = False

    def tensor_split(self, sections: int) -> list["TopK"]:
        """Split along the tokens, as `torch.tensor_split` does."""
        parts = zip(self.weights.tensor_split(sections), self.experts.tensor_split(sections), strict=True)
        return [TopK(weights, experts, self.is_unpadded) for weights, experts in parts]


class Routing(NamedTuple):
    """Output of a router.

    Attributes:
        logits: ``(T, E)``, float32 or wider, logits of all experts, for the router z-loss; None if the router has none.
        probabilities: ``(T, E)``, float32 or wider, share of each expert in a token, for the balance loss and the
            entropy; 0 for padding.
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
        token_losses: ``(T,)``, float32 or wider, loss of each token, 0 for padding, whose mean is added to the
            auxiliary loss; None for no such loss.
        shared_weights: ``(T, n)``, float32 or wider, weights of shared experts that the router scores; None
            for shared experts without weights.
        state: ``(T, R)``, float32 or wider, state of the router for the next layer; None for a router without one.
        tokens_per_expert: ``(E,)``, int64, slots of each expert, of this process; None if they are not counted yet.
    """

    logits: Tensor | None
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    token_mask: Tensor | None = None
    is_unpadded: bool = True
    token_losses: Tensor | None = None
    shared_weights: Tensor | None = None
    state: Tensor | None = None
    tokens_per_expert: Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        experts: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        logits: Tensor | None = None,
        token_losses: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> "Routing":
        """Make the result of a custom router.

        The leading dims ``(...)`` are the leading dims of the router's input, usually ``(B, S)``. Padding is removed:
        its slots become -1, its weights, probabilities and losses 0.

        Args:
            experts: ``(..., K)``, int64, the `top_k` expert ids of each token in any order; -1 for an unused slot.
            weights: ``(..., K)``, floating, routing weights, through which the router is trained.
            probabilities: ``(..., E)``, floating, share of each expert in a token, for the balance loss and the
                entropy. The rows usually have the sum 1.
            logits: ``(..., E)``, floating, logits, for the router z-loss.
            token_losses: ``(...)``, floating, a loss of each token, such as a sparsity loss. The mean over the tokens
                of all ranks is added to the auxiliary loss.
            token_mask: the mask that the router was called with.

        Returns:
            Routing with float32 or wider values and the tokens in one dim.

        Raises:
            ValueError: if the leading dims differ from the leading dims of `experts`. The layer checks the rest.
        """
        leading = experts.shape[:-1]
        of_tokens = {"weights": weights, "probabilities": probabilities, "logits": logits}
        found = {name: part.shape[:-1] for name, part in of_tokens.items() if part is not None}
        for name, dims in {**found, "token_losses": leading if token_losses is None else token_losses.shape}.items():
            if dims != leading:
                raise ValueError(f"{name} must have the leading dims of experts {(*leading,)}, got {(*dims,)}")
        experts = experts.flatten(0, -2)
        routing = cls(
            None if logits is None else _wide(logits.flatten(0, -2)),
            _wide(probabilities.flatten(0, -2)),
            _wide(weights.flatten(0, -2)).masked_fill(experts < 0, 0.0),
            experts,
            is_unpadded=False,
            token_losses=None if token_losses is None else _wide(token_losses.flatten()),
        )
        return routing if token_mask is None else routing.without_padding(token_mask)

    def without_padding(self, token_mask: Tensor) -> "Routing":
        """Give tokens for which `token_mask` ``(T,)`` is False the expert ids -1, and weights and losses of 0."""
        is_padding = ~token_mask.unsqueeze(1)
        losses = self.token_losses
        return self._replace(
            probabilities=self.probabilities.masked_fill(is_padding, 0.0),
            weights=self.weights.masked_fill(is_padding, 0.0),
            experts=self.experts.masked_fill(is_padding, -1),
            token_mask=token_mask,
            is_unpadded=False,
            token_losses=None if losses is None else losses.masked_fill(~token_mask, 0.0),
        )

    def scaled(self, factor: Tensor) -> "Routing":
        """Multiply the weights of all experts by a factor ``(1,)``."""
        factor, shared = factor.to(self.weights.dtype), self.shared_weights
        return self._replace(weights=self.weights * factor, shared_weights=None if shared is None else shared * factor)

    @property
    def top_k(self) -> TopK:
        """Expert ids and routing weights, the input of dispatchers."""
        return TopK(self.weights, self.experts, self.is_unpadded)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# In the ids of a replay: a slot that computes nothing. -1 in all slots of a token lets the router choose its experts.
NO_EXPERT = -2


def chooses_itself(given: Tensor) -> Tensor:
    """Return for which tokens ``(T,)`` of the ids ``(T, K)`` of a replay the router chooses the experts."""
    return (given == -1).all(1)


def completed(given: Tensor, choose: Callable[[], Tensor]) -> Tensor:
    """Return the ids ``(T, K)`` of a replay with what the router chooses where it does, and -1 for no expert."""
    is_own = chooses_itself(given)
    if is_own.any():
        given = torch.where(is_own.unsqueeze(1), choose(), given)
    return given.clamp_min(-1)


def checked_routing(
    router: nn.Module, config: MoEConfig, x: Tensor, token_mask: Tensor | None, given: Tensor | None
) -> Routing:
    """Call a custom router, with the experts ``(T, K)`` of a replay if they are given; raise if its output is wrong."""
    with choices_are_kept():
        if given is not None:
            with torch.no_grad():
                given = completed(given, lambda: router(x, token_mask).experts)
        routing: Routing = router(x, token_mask) if given is None else router(x, token_mask, experts=given)
    _check_routing(routing, config, x, token_mask, router)
    if given is not None:
        _check_is_replayed(routing, given, type(router).__name__)
    return routing


def _check_routing(routing: object, config: MoEConfig, x: Tensor, token_mask: Tensor | None, router: nn.Module) -> None:
    """Raise for a result of a custom router that does not fit the layer or the mask with which it was called.

    On devices other than the CPU, and in compiled code, wrong values fail an assertion of the device, whose message
    does not contain the values.
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
    experts, num_experts = routing.experts, config.num_selectable_experts
    is_known = (experts >= -1) & (experts < num_experts)
    wanted = f"expert ids of router {name} must be in [-1, number of experts ({num_experts}))"
    if fails(is_known, wanted):
        raise ValueError(f"{wanted}, got {int(experts[~is_known][0])}")
    wanted = f"router {name} must set is_unpadded=False for ids of -1"
    if routing.is_unpadded and fails(experts >= 0, wanted):
        raise ValueError(f"{wanted}, as Routing.of does, got True")
    for field in ("weights", "probabilities", "token_losses"):
        values, wanted = getattr(routing, field), f"{field} of router {name} must be finite"
        # One pass over the values; a sum is not finite if a summand is not.
        if values is not None and fails(values.detach().sum().isfinite(), wanted):
            token = int((~values.detach().isfinite()).nonzero()[0, 0])
            raise ValueError(f"{wanted}, got {values[token].tolist()} for token {token}")


def _check_is_replayed(routing: Routing, given: Tensor, name: str) -> None:
    """Raise for a custom router that does not route to the `experts` of a record."""
    is_same = (routing.experts.sort(1).values == given.sort(1).values).all(1)
    if routing.token_mask is not None:
        is_same = is_same | ~routing.token_mask
    wanted = f"router {name} must route to the experts that it gets in a replay"
    if fails(is_same, wanted):
        token = int((~is_same).nonzero()[0])
        raise ValueError(f"{wanted}, {given[token].tolist()} for token {token}, got {routing.experts[token].tolist()}")


def fails(holds: Tensor, message: str) -> bool:
    """Return whether a condition fails; in compiled code and off the CPU, assert it on the device and return False."""
    if holds.device.type != "cpu" or torch.compiler.is_compiling():
        assert_async(holds.all(), message)
        return False
    return not holds.all()
