"""Recorded and replayed routing of sparse blocks of transformers whose experts have the implementation "maxmoe".

A block calls its router, and then its experts with ids and weights. While its routing is recorded or replayed, hooks of
torch keep the leading dims of the block's input and the logits of its router, and `experts_forward` asks here for the
ids and weights to compute with.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from maxmoe._torch import never_compiled
from maxmoe._torch.this_thread import OfThisThread
from maxmoe.adapters import adapted_module
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import config_of_block, family_of_block
from maxmoe.integrations.transformers.experts import runs_on_maxmoe
from maxmoe.integrations.transformers.moe_block import check_replayable, correction_bias_of, router_logits
from maxmoe.nn.replay import finds_routing_layers, given_experts, observe
from maxmoe.nn.router import select_experts
from maxmoe.ops import RaggedPlan, ragged_plan


def register() -> None:
    """Let `record_routing` and `replay_routing` find the blocks."""
    finds_routing_layers(_routing_block)


class RoutingBlock:
    """A sparse block, as `maxmoe.nn.replay` sees a layer.

    Attributes:
        config: config of the layer that computes the same as the block.
    """

    config: MoEConfig

    def __init__(self, block: nn.Module) -> None:
        self.config, self._family = config_of_block(block), family_of_block(block)
        if self._family.scales_sum:
            self.config = replace(self.config, routed_scaling_factor=1.0)
        self._keys = {entry.names[0]: entry.key for entry in self._family.block.entries}
        self._block = ref(block)  # which keeps this object
        self._hooks: tuple[Any, ...] = ()
        self._handles: list[Any] = []
        self._call: OfThisThread[tuple[Sequence[int], Tensor | None]] = OfThisThread("router logits")

    @property
    def routing_hooks(self) -> tuple[Any, ...]:
        """Observers of the routing, as `maxmoe.MoE` has them."""
        return self._hooks

    @routing_hooks.setter
    def routing_hooks(self, hooks: tuple[Any, ...]) -> None:
        block: Any = self._block()
        self._hooks = hooks
        experts: Any = adapted_module(block.experts)
        if hooks and not self._handles:
            router = block.get_submodule(self._keys["router.weight"].split(".")[0])
            self._handles = [
                block.register_forward_pre_hook(self._begin, with_kwargs=True),
                router.register_forward_hook(self._keep_logits),
            ]
            experts.routing_block = self
        elif not hooks:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            experts.routing_block = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out hooks and block, because a context holds for the block that it got, not for its copies."""
        return {**self.__dict__, "_block": None, "_hooks": (), "_handles": []}

    @never_compiled
    def _begin(self, block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        first = next(iter(inspect.signature(block.forward).parameters))  # keywords have any order
        x: Tensor = arguments[0] if arguments else options[first]
        self._call.value = x.shape[:-1], None

    @never_compiled
    def _keep_logits(self, router: nn.Module, arguments: object, outputs: Any) -> None:
        if self._call.value is not None:
            self._call.value = self._call.value[0], router_logits(self._family, outputs)

    @never_compiled
    def route(self, experts: Tensor, weights: Tensor) -> tuple[Tensor | RaggedPlan, Tensor]:
        """Return the router's ids and weights, each ``(T, K)``; in a replay, plan and weights of the recorded ids."""
        if not self._hooks:
            return experts, weights
        block: Any = self._block()
        leading_dims, logits = self._call.read(adapted_module(block.experts)) or ((), None)
        self._call.value = None  # no longer than needed, because the logits keep their graph
        if logits is None:
            raise RuntimeError(
                f"the router of {type(block).__name__} has run in code that was compiled before its routing was "
                "recorded or replayed: call torch.compiler.reset() first"
            )
        given, num_experts = given_experts(self._hooks, leading_dims, experts.device, None), self.config.num_experts
        bias = correction_bias_of(block, self._keys)
        if given is None:
            selected = experts
            if self.config.zero_computation is not None:  # their tokens come with expert 0 and a weight of zero
                selected = select_experts(self.config, logits.detach(), bias, None, None).experts
            observe(self._hooks, selected, leading_dims)
            return experts, weights
        check_replayable(self.config, type(block).__name__)
        if self._family.lies_in_layer:
            raise ValueError(f"{type(block).__name__}: replay_routing needs the logits, its router returns none")
        by_ids = None if self.config.router_rule.takes_ids is None else experts
        routing = select_experts(self.config, logits, bias, None, given, by_ids)
        selected = routing.experts
        observe(self._hooks, selected, leading_dims)
        plan = ragged_plan(selected.masked_fill(selected >= num_experts, -1), num_experts)
        return plan, routing.weights.to(weights.dtype)


# The objects of blocks whose routing has been recorded or replayed.
_blocks: WeakKeyDictionary[nn.Module, RoutingBlock] = WeakKeyDictionary()


def _routing_block(module: nn.Module) -> RoutingBlock | None:
    child = dict(module.named_children()).get("experts")
    experts: Any = None if child is None else adapted_module(child)
    if not runs_on_maxmoe(experts):
        return None
    if module not in _blocks:
        _blocks[module] = RoutingBlock(module)
    return _blocks[module]
