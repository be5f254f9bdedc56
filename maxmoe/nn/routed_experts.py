"""Router and routed experts of a layer, in one operator or in their modules."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maxmoe._torch import is_called_plainly, is_traced
from maxmoe.nn.custom_router import checked_routing
from maxmoe.nn.dispatcher import ExpertRunner, LocalDispatcher
from maxmoe.nn.experts import Experts
from maxmoe.nn.router import Router, is_custom_router
from maxmoe.nn.routing import Routing
from maxmoe.nn.routing_hooks import given_experts, observe
from maxmoe.nn.tensor_parallel_region import LayerInputs, LocalRegion
from maxmoe.quantization import QuantizedWeight


def run_routed_experts(
    layer: Any, inputs: LayerInputs, token_mask: Tensor | None, leading_dims: Sequence[int]
) -> tuple[Routing, Tensor, Tensor]:
    """Route tokens and compute their experts.

    Args:
        layer: `MoE` layer.
        inputs: input ``(T, D)`` of each part of the layer.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.
        leading_dims: sizes ``(..., S)`` of the input of the layer, with sequences of S tokens.

    Returns:
        Routing, outputs of the experts ``(T, D)`` and the number ``()`` of dropped slots.
    """
    hooks, results = layer.routing_hooks, None
    given = given_experts(hooks, leading_dims, inputs.router.device) if hooks else None
    # Hooks that give no experts do not decide: a recomputation, during which others may be there, takes the same way.
    if given is None and token_mask is None and layer.latent_in is None and not is_traced():
        results = _in_one_operator(layer.router, layer.experts, layer.runner, inputs.router)
    if results is None:
        results = _in_modules(layer, inputs, token_mask, leading_dims, given)
    if hooks:
        observe(hooks, results[0], leading_dims)
    return results


def _in_one_operator(
    router: Any, experts: Any, runner: ExpertRunner, x: Tensor
) -> tuple[Routing, Tensor, Tensor] | None:
    """Compute the same as `_in_modules`, in less time for few tokens; None if only the modules can."""
    if not (_is_local(runner) and _is_plain(router, experts)):
        return None
    config, matrices = router.config, (experts.gate_proj, experts.up_proj, experts.down_proj)
    if QuantizedWeight in map(type, matrices):
        return None
    try:
        routed, logits, weights, ids, probabilities, dropped = torch.ops.maxmoe.routed_experts(
            x,
            router.weight,
            router.bias,
            config.top_k,
            config.score_function,
            router.score_correction_bias,
            config.num_groups,
            config.top_k_groups,
            config.group_score,
            config.normalization,
            config.routed_scaling_factor,
            *matrices,
            experts.gate_bias,
            experts.up_bias,
            experts.down_bias,
            experts.activation,
            config.activation_limit,
            "experts" in experts.recompute,
        )
    except ValueError:
        return None  # the modules raise it with the path of the layer
    return Routing(logits, probabilities, weights, ids), routed, dropped


def _in_modules(
    layer: Any, inputs: LayerInputs, token_mask: Tensor | None, leading_dims: Sequence[int], given: Tensor | None
) -> tuple[Routing, Tensor, Tensor]:
    num_sequences, region = math.prod(leading_dims[:-1]), layer.runner.region
    routing: Routing
    x, is_custom = inputs.router, is_custom_router(layer.router)
    if is_custom or layer.config.router == "random":  # only then, because two dims fix the sizes in torch.export
        x = x.view(num_sequences, leading_dims[-1], x.shape[1])
    if is_custom:
        routing = checked_routing(layer.router, layer.config, x, token_mask, given)
    else:
        options = {} if given is None else {"experts": given}
        routing = layer.router(x, token_mask, **options)
    rows = inputs.experts if layer.latent_in is None else region.copy_to_experts(layer.latent_in(inputs.experts))
    routed, dropped = layer.runner.run(
        layer.experts,
        rows,
        region.assign(routing.top_k),
        num_sequences=num_sequences,
        recompute="dispatch" in layer.recompute,
    )
    if layer.latent_out is not None:
        routed = layer.latent_out(region.reduce_from_experts(routed))
    return routing, routed, dropped


def _is_local(runner: ExpertRunner) -> bool:
    """Return whether the runner does no more than `ragged_plan` and the experts, and the plan has a row per slot."""
    dispatcher = runner.dispatcher
    return (
        type(dispatcher) is LocalDispatcher
        and type(runner.region) is LocalRegion
        and runner.num_chunks == 1
        and not dispatcher.scales_input
        and dispatcher.buffer_factor is None
        and dispatcher.experts.are_all
        and dispatcher.experts.are_selectable
    )


def _is_plain(router: Any, experts: Any) -> bool:
    """Return whether the modules are those of this package, and their calls no more than their forward."""
    return (
        type(router) is Router
        and type(experts) is Experts
        and router.config.router == "learned"
        and isinstance(experts.activation, str)
        and is_called_plainly(router)
        and is_called_plainly(experts)
    )
