"""The layer in the place of a sparse block of transformers, made of the modules of the block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe.adapters import adapted_module
from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import check_tensors_of, config_of_block, family_of_block
from maxmoe.declaration import Declaration, FusedGate, declaration_of
from maxmoe.families.family import Family
from maxmoe.families.layouts import Entry
from maxmoe.integrations.transformers._transformers import experts_implementation, is_experts
from maxmoe.integrations.transformers.token_masks import mask_of_call
from maxmoe.nn import Experts, MoE, MoEFeedForward, Router, Routing, ZeroComputationExperts, load_balance_loss
from maxmoe.nn.dispatcher import LayerInputs, sum_of
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import select_experts
from maxmoe.nn.routing import chooses_itself
from maxmoe.ops import RaggedPlan, ragged_sort, ragged_unsort, route


def _part(name: str) -> Any:
    """Return a property: the module of the block with the parameter that `MoE` has under a name; None without one."""

    def part(layer: "TransformersMoE") -> nn.Module | None:
        module = dict(layer.named_children()).get(layer._keys.get(name, "").split(".")[0])
        return None if isinstance(module, nn.Identity) else module  # in Nemotron, without latent experts

    return property(part)


class TransformersMoE(MoEFeedForward):
    """`MoEFeedForward` whose parts are the modules of a sparse block of transformers, under their names.

    The router of the block gives the logits, in its dtype; its experts run on the operators of maxmoe, which
    ``experts_implementation="maxmoe"`` calls. Therefore the state dict, the adapters of PEFT and the router logits that
    a model returns do not change. `replace_moe_blocks` makes such layers.

    Args:
        block: sparse block of a family in `maxmoe.presets`, whose modules the layer takes over.
        training: fields of `maxmoe.MoEConfig` that a block leaves to the training loop, as in `replace_moe_blocks`.

    Attributes:
        family: family of the block.

    Raises:
        ValueError: for a block of another family, or with other tensors than its family.
    """

    # Every process computes the shared experts whole.
    router, shared_experts = _part("router.weight"), _part("shared_experts.up_proj")
    experts = _part("experts.down_proj")  # the last of two modules in JetMoE
    latent_out = _part("latent_out.weight")
    latent_projection, latent_norm = _part("latent_in.weight"), _part("latent_in.norm.weight")
    output_gate = _part("shared_experts.output_gate")
    input_norm, sum_norm = _part("input_norm.weight"), _part("sum_norm.weight")

    def __init__(self, block: nn.Module, **training: Any) -> None:
        family_of_block(block).check_replaceable()
        super(MoE, self).__init__()  # skips MoE.__init__, which creates the parts of a MoE
        self.config = config = replace(config_of_block(block), **training)
        check_tensors_of(block, MoE(config, device="meta"), "replace_moe_blocks")
        self.family = family = family_of_block(block)
        self._keys = {entry.names[0]: entry.key for entry in family.block.entries}
        first, *others = dict.fromkeys(each.key.split(".")[0] for each in family.block.entries if each.is_of_experts)
        self._first_experts = first if others else None  # in JetMoE, the module of gate and up
        for name, module in block.named_children():
            setattr(self, name, module)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name in family.own_parameters:
            self.register_parameter(name, block.get_parameter(name))
        has_more = config.has_zero_computation_outputs
        self.zero_computation_experts = ZeroComputationExperts(config, device="meta") if has_more else None
        self.set_up_training(load_balance_loss)
        # Updates the correction bias of the block. The tuple keeps it out of the state dict.
        self._balance = (config.router_rule.make(config, device="meta"),) if config.score_correction_bias else ()
        if is_experts(self.experts):
            self.experts.recompute_names, self.experts.recompute = Experts.recompute_names, Experts.recompute
        else:
            self.experts.uses_maxmoe = True  # read by patched_families.py
        if family.has_capacity:
            self.router.classifier.to(self.router.dtype)  # as its first forward does, which may get gathered weights
        _declare(self, self.router, config, family.block.entries)
        self.train(block.training)

    @property
    def latent_in(self) -> Callable[[Tensor], Tensor] | None:  # type: ignore[override]
        """Projection before latent experts, with the norm after it if the block has one."""
        projection, norm = self.latent_projection, self.latent_norm
        return projection if norm is None else lambda x: norm(projection(x))

    @classmethod
    def from_transformers(cls, block: nn.Module) -> Self:
        """Create a layer from the sparse block of a transformers model, with the modules of the block."""
        return cls(block)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """Route the tokens and compute their experts.

        Args:
            x: ``(..., S, D)``, as in `MoE.forward`.
            token_mask: ``(..., S)``, bool, False for padding; None for the mask of the model that calls the layer.

        Returns:
            Output ``(..., S, D)``. In gpt-oss and Llama 4, whose models drop a second value, a tuple with None.
        """
        hidden_states = super().forward(x, mask_of_call(self) if token_mask is None else token_mask)
        return (hidden_states, None) if self.family.returns_scores else hidden_states

    def _route(
        self,
        x: Tensor,
        token_mask: Tensor | None,
        leading_dims: Sequence[int],
        given: Tensor | None,
        state: Tensor | None,
    ) -> Routing:
        """Call the router of the block, whose output transformers records, and select experts by its logits."""
        router, family, bias = self.router, self.family, self._correction_bias
        is_outside = bias is not None and "." not in self._keys["router.score_correction_bias"]
        tokens = x.view(*leading_dims, -1) if family.has_capacity or family.has_state else x
        if family.has_state:
            outputs = router(tokens, None if state is None else state.view(*leading_dims, -1))
        else:
            outputs = router(tokens, bias) if is_outside else router(tokens)
        if self.config.router_rule.scores_shared_experts:
            return self._routed_with_shared(outputs, token_mask, given)
        logits = router_logits(family, outputs)
        try:
            routing = select_experts(self.config, logits, bias, token_mask, given)
        except ValueError as error:
            raise ValueError(f"{module_path(self)}: {error}") from error
        if family.has_state:
            routing = routing._replace(state=outputs[-1].flatten(0, -2))
        if not family.has_capacity:
            return routing
        is_dropped = ~outputs[0].flatten(0, -2).any(1)
        # A replay has been recorded without the slots of dropped tokens.
        return _without(routing, is_dropped if given is None else is_dropped & chooses_itself(given))

    def _routed_with_shared(
        self, outputs: Sequence[Tensor], token_mask: Tensor | None, given: Tensor | None
    ) -> Routing:
        """Take experts and weights as the router of the block gives them; it has no logits of the shared experts."""
        if given is not None:
            check_replayable(self.config, module_path(self))
        logits, weights, experts, shared_weights = outputs
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits, score_function = logits.to(wide), self.config.score_function
        _, experts, probabilities = route(logits, self.config.top_k, score_function=score_function, experts=experts)
        routing = Routing(logits, probabilities, weights.to(wide), experts, shared_weights=shared_weights)
        return routing if token_mask is None else routing.without_padding(token_mask)

    def _expert_function(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan, *foreign: Any) -> Tensor:
        """Compute rows as `maxmoe.nn.Experts`, by a call of the experts of the block, around which adapters may lie."""
        experts: Any = self.routed_experts
        if is_experts(experts) and experts_implementation(experts.config) != "maxmoe":
            raise ValueError(
                f"{module_path(self)}: the experts implementation of a model with replaced blocks must be 'maxmoe', "
                f"got {experts_implementation(experts.config)!r}"
            )
        if self._first_experts is None:
            rows: Tensor = self.experts(x, plan, weights, *foreign)
            return rows
        first, activation = self.get_submodule(self._first_experts), self.get_submodule("activation")
        gate, up = first(ragged_sort(x, plan), plan).chunk(2, dim=-1)
        return ragged_unsort(self.experts(activation(gate) * up, plan), plan, weights).to(x.dtype)

    def _compute_others(
        self, inputs: LayerInputs, _token_mask: Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> tuple[None, Tensor | None]:
        """Compute the shared and the zero-computation experts, which every process has whole."""
        shared_experts, output_gate = self.shared_experts, self.output_gate
        parts = []
        if shared_experts is not None:
            weights, are_scored = routing.shared_weights, self.config.router_rule.scores_shared_experts
            out = shared_experts(inputs.router, *((weights,) if are_scored else ()))
            if weights is not None and not are_scored:
                out = out * weights.to(out.dtype)
            parts.append(out if output_gate is None else output_gate(inputs.router).sigmoid() * out)
        if self.zero_computation_experts is not None:
            parts.append(self.zero_computation_experts(inputs.router, routing.top_k, dtype))
        parts += [getattr(self, name).expand_as(inputs.router) for name in self.family.own_parameters]
        return None, sum_of(*parts) if parts else None

    def hidden_states_and_routing(
        self, x: Tensor, token_mask: Tensor | None, router_state: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Return hidden states and routing as `MoE`; tokens that the router of the block has dropped are counted."""
        hidden_states, routing, dropped = super().hidden_states_and_routing(x, token_mask, router_state)
        if self.family.has_capacity:
            is_dropped = routing.experts < 0
            mask = routing.token_mask
            dropped = dropped + (is_dropped if mask is None else is_dropped & mask.unsqueeze(1)).sum()
        return hidden_states, routing, dropped

    @property
    def declaration(self) -> Declaration:
        """Declare whether the router counts the tokens of a sequence."""
        declaration = super().declaration
        return replace(declaration, needs_whole_sequences=True) if self.family.has_capacity else declaration

    @property
    def _correction_bias(self) -> Tensor | None:
        return correction_bias_of(self, self._keys) if self.config.score_correction_bias else None

    @property
    def balanced_router(self) -> Router | None:
        """Router that updates the correction bias of the block; None without such a bias."""
        for router in self._balance:
            router.score_correction_bias = self._correction_bias
            return router
        return None

    @property
    def routed_experts(self) -> nn.Module:  # type: ignore[override]
        """Module of the routed experts, without adapters that wrap it."""
        return adapted_module(self.experts)

    @property
    def expert_dtype(self) -> torch.dtype:
        """Dtype of the matrices of the routed experts."""
        _, _, name = self._keys["experts.down_proj"].format(expert=0).partition(".")
        dtype: torch.dtype = attrgetter(name)(self.routed_experts).dtype
        return dtype


class StatefulTransformersMoE(TransformersMoE):
    """`TransformersMoE` of a block that takes and returns the state of its router, as in ZAYA."""

    def forward(  # type: ignore[override]
        self, x: Tensor, router_state: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Any:
        """Route the tokens and compute their experts.

        Args:
            x: ``(..., S, D)``, as in `MoE.forward`.
            router_state: ``(..., S, R)``, what the block of the layer before has returned; None in the first layer.
            token_mask: as in `TransformersMoE.forward`.

        Returns:
            Output ``(..., S, D)`` and state.
        """
        mask = mask_of_call(self) if token_mask is None else token_mask
        return MoEFeedForward.forward(self, x, mask, router_state)


def layer_of_block(block: nn.Module, **training: Any) -> TransformersMoE:
    """Return the layer that replaces a block; `training` as in `replace_moe_blocks`."""
    kind = StatefulTransformersMoE if family_of_block(block).has_state else TransformersMoE
    return kind(block, **training)


def check_replayable(config: MoEConfig, block: str) -> None:
    """Raise if the router of a block returns too little to weigh the experts of a replay."""
    if config.router_rule.scores_shared_experts:
        raise ValueError(
            f"{block}: replay_routing needs the logits of the shared experts, which the router of this block does not "
            "return: replay in maxmoe.MoE, see MoE.from_transformers"
        )


def router_logits(family: Family, outputs: Any) -> Tensor:
    """Return the logits ``(T, E)``, float32 or wider, among the outputs of the router of a family's block."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs[family.logits_index]
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))


def correction_bias_of(block: nn.Module, keys: Mapping[str, str]) -> Tensor:
    """Return the correction bias ``(E,)`` of a block; `keys` has the block's name for each parameter of `MoE`."""
    owner, _, name = keys["router.score_correction_bias"].rpartition(".")
    first, _, path = owner.partition(".")
    module = adapted_module(block.get_submodule(first)) if owner else block
    bias: Any = getattr(module.get_submodule(path), name)
    bias = bias.detach().flatten()  # Laguna has a parameter that is not trained, and ERNIE 4.5 one with another dim
    whole: Tensor = bias.to_local() if is_dtensor(bias) else bias  # on a mesh, on every rank
    return whole


def _without(routing: Routing, is_dropped: Tensor) -> Routing:
    """Remove the slots of tokens ``(T,)`` that their router has dropped; they still count for the losses."""
    is_dropped = is_dropped.unsqueeze(1)
    return routing._replace(
        weights=routing.weights.masked_fill(is_dropped, 0.0),
        experts=routing.experts.masked_fill(is_dropped, -1),
        is_unpadded=False,
    )


def _declare(block: nn.Module, router: nn.Module, config: MoEConfig, entries: Sequence[Entry]) -> None:
    """Declare router and experts of a block as `MoE` does, with the names and layouts of the block's parameters.

    The matrices are not computed in parts where gate and up are concatenated, because a shard would hold one of them
    alone, and where all experts share one matrix. They are not sharded by experts if a stack has unused matrices, if
    they are in two modules, and if each is a parameter of its own.
    """
    of_ours = Experts(config, device="meta").declaration
    of_modules: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if entry.is_of_experts:
            module, _, name = entry.key.partition(".")
            of_modules.setdefault(module, {})[name] = entry
    for module, of_experts in of_modules.items():
        stacks = {name: entry for name, entry in of_experts.items() if entry.is_stack}
        is_sharded = len(of_modules) == 1 and not any(entry.has_unused_matrices for entry in stacks.values())
        names: dict[str, tuple[str | None, ...]] = {}
        input_dims: dict[str, str] = {}
        fused: dict[str, FusedGate] = {}
        for name, entry in stacks.items():
            ours = entry.names[0].removeprefix("experts.")
            expert, *dims = of_ours.logical_names[ours]
            dims = [*reversed(dims)] if entry.transposed else dims
            names[name] = (expert if is_sharded else None, *(dims[1:] if entry.is_flat else dims))
            if ours in of_ours.input_dims and not entry.is_flat:
                input_dims[name] = of_ours.input_dims[ours]
                if len(entry.names) > 1:
                    fused[name] = "interleaved" if entry.interleaved else "concatenated"
        is_whole = "concatenated" in fused.values() or any(entry.is_flat for entry in stacks.values())
        block.get_submodule(module).declaration = replace(  # type: ignore[assignment]
            of_ours,
            logical_names=names,
            input_dims=input_dims,
            fused_gates=fused,
            # Parameters are also in modules whose forward is not called.
            fsdp_unit=of_ours.fsdp_unit or any(each.is_flat or not each.is_stack for each in of_experts.values()),
            tensor_parallel_dims={} if is_whole or not names else of_ours.tensor_parallel_dims,
            added_to_output=tuple(name for name in ("down_proj_bias",) if name in names),
        )
    if (
        config.expert_norms is not None and config.expert_norms.output
    ):  # the experts gather it, so that its gradient is summed over the ranks of all experts
        experts: Any = block.get_submodule("experts")
        experts.post_expert_norm.declaration = Declaration(logical_names={"weight": ("norm",)})
    keys = {entry.names[0]: entry.key.partition(".")[2] for entry in entries}
    of_router: dict[str, tuple[str | None, ...]] = {}
    for path, part in config.router_rule.make(config, device="meta").named_modules(prefix="router"):
        declared = declaration_of(part).logical_names
        of_router |= {keys[f"{path}.{name}"]: dims for name, dims in declared.items() if f"{path}.{name}" in keys}
    router.declaration = Declaration(logical_names=of_router, fsdp_unit=True)  # type: ignore[assignment]
