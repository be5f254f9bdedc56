"""The layer in the place of a sparse block of transformers, made of the modules of the block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.adapters import adapted_module
from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import check_tensors_of, config_of_block, family_of_block
from maxmoe.declaration import Declaration, FusedGate, declaration_of
from maxmoe.expert_load.stats import MoEStats
from maxmoe.families.family import Family
from maxmoe.families.layouts import Entry
from maxmoe.integrations.transformers._transformers import experts_implementation, is_experts
from maxmoe.integrations.transformers.token_masks import mask_of_call
from maxmoe.nn import Experts, MoE, Router, Routing, ZeroComputationExperts
from maxmoe.nn.dispatcher import LayerInputs, sum_of
from maxmoe.nn.feed_forward import FeedForwardLayer
from maxmoe.nn.layer import RouterInputs
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import make_router, select_experts
from maxmoe.nn.routing import chooses_itself
from maxmoe.nn.windows import BufferUse
from maxmoe.ops import RaggedPlan, ragged_sort, ragged_unsort, route

# Parts of a layer, each with a parameter that tells which module of a block is the part.
_PARTS = {
    "router": "router.weight",
    "experts": "experts.down_proj",
    "shared_experts": "shared_experts.up_proj",
    "output_gate": "shared_experts.output_gate",
    "latent_in": "latent_in.weight",
    "latent_norm": "latent_in.norm.weight",
    "latent_out": "latent_out.weight",
    "input_norm": "input_norm.weight",
    "sum_norm": "sum_norm.weight",
}


class TransformersMoE(FeedForwardLayer):
    """Layer as `MoEFeedForward` whose parts are the modules of a sparse block of transformers, under their names.

    The router of the block gives the logits, in its dtype; its experts run on the operators of maxmoe, which
    ``experts_implementation="maxmoe"`` calls. Therefore the state dict, the adapters of PEFT and the router logits that
    a model returns do not change. `replace_moe_blocks` makes such layers, and `from_transformers` makes one.

    Attributes:
        family: family of the block.
    """

    def __init__(self, block: nn.Module, **training: Any) -> None:
        family_of_block(block).check_replaceable()
        config = replace(config_of_block(block), **training)
        check_tensors_of(block, MoE(config, device="meta"), "replace_moe_blocks")
        super().__init__(config)
        self.family = family = family_of_block(block)
        for name, module in block.named_children():
            setattr(self, name, module)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name in family.own_parameters:
            self.register_parameter(name, block.get_parameter(name))
        # Every process computes the shared and the zero-computation experts whole.
        has_more = config.has_zero_computation_outputs
        self.zero_computation_experts = ZeroComputationExperts(config, device="meta") if has_more else None
        self._keys = keys = {entry.names[0]: entry.key for entry in family.block.entries}
        names = {part: keys[name].split(".")[0] for part, name in _PARTS.items() if name in keys}
        # Names, because adapters take the places of modules. Nemotron has an Identity in the place of a projection.
        self._names = {part: name for part, name in names.items() if type(getattr(self, name)) is not nn.Identity}
        # Updates the correction bias of the block. The tuple keeps it out of the state dict.
        self._balance = (make_router(config, device="meta"),) if config.score_correction_bias else ()
        experts: Any = self.part("experts")
        if is_experts(experts):
            experts.recompute_names, experts.recompute = Experts.recompute_names, Experts.recompute
        else:
            experts.uses_maxmoe = True  # read by patched_families.py
        _declare(self, self.part("router"), config, family.block.entries)
        self.train(block.training)

    @staticmethod
    def from_transformers(block: nn.Module, **training: Any) -> "TransformersMoE":
        """Create a layer from the sparse block of a transformers model, with the modules of the block.

        Args:
            block: sparse block of a family in `maxmoe.presets`, whose modules the layer takes over.
            training: fields of `maxmoe.MoEConfig` that a block leaves to the training loop, as in `replace_moe_blocks`.

        Raises:
            ValueError: for a block of another family, or with other tensors than its family.
        """
        return _OF_FAMILIES.get(family_of_block(block).preset.__name__, TransformersMoE)(block, **training)

    def part(self, name: str) -> Any:
        """Return the module of the block that is a part of the layer; None for a part that the block lacks."""
        own_name = self._names.get(name)
        return None if own_name is None else getattr(self, own_name)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        router_state: Tensor | None = None,
        router_inputs: Tensor | None = None,
    ) -> Any:
        """Route the tokens and compute their experts, as `MoEFeedForward.forward`.

        Without a `token_mask`, tokens have the mask of the model that calls the layer. In gpt-oss and Llama 4, whose
        models drop a second value, the output is a tuple with None.
        """
        mask = mask_of_call(self) if token_mask is None else token_mask
        output = super().forward(x, mask, router_state, router_inputs)
        return (output, None) if self.family.returns_scores else output

    def route(self, inputs: RouterInputs) -> Routing:
        """Call the router of the block, whose output transformers records, and select experts by it."""
        return self._routing_of(self._router_outputs(inputs), inputs)

    def _router_outputs(self, inputs: RouterInputs) -> Any:
        """Call the router of the block; it takes the correction bias if the bias lies beside it."""
        is_outside = "." not in self._keys.get("router.score_correction_bias", ".")
        return self.part("router")(inputs.x, *([correction_bias_of(self, self._keys)] if is_outside else []))

    def _routing_of(self, outputs: Any, inputs: RouterInputs) -> Routing:
        """Select experts by the logits among the outputs of the router of the block."""
        logits, bias = router_logits(self.family, outputs), correction_bias_of(self, self._keys)
        try:
            selected = self._selected(outputs, inputs)
            return select_experts(self.config, logits, bias, inputs.token_mask, inputs.experts, selected)
        except ValueError as error:
            raise ValueError(f"{module_path(self)}: {error}") from error

    def _selected(self, outputs: Any, inputs: RouterInputs) -> Tensor | None:
        """Return the experts that the router of the block has selected by ids; None to select them by the logits."""
        return None

    def expert_function(self) -> Callable[..., Tensor]:
        """Return a function with the arguments of `Experts.forward` that calls the experts of the block."""
        experts, own = self.part("experts"), self.routed_experts
        if is_experts(own) and experts_implementation(own.config) != "maxmoe":
            raise ValueError(
                f"{module_path(self)}: the experts implementation of a model with replaced blocks must be 'maxmoe', "
                f"got {experts_implementation(own.config)!r}"
            )
        return lambda x, weights, plan, *foreign: experts(x, plan, weights, *foreign)

    def latent_projections(self) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
        """Return the projections, the first with the norm after it if the block has one."""
        projection, norm = self.part("latent_in"), self.part("latent_norm")
        return projection if norm is None else lambda x: norm(projection(x)), self.part("latent_out")

    def compute_others(
        self, inputs: LayerInputs, _token_mask: Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> tuple[None, Tensor | None]:
        """Compute the shared and the zero-computation experts, which every process has whole."""
        shared_experts, gate = self.part("shared_experts"), self.part("output_gate")
        parts = []
        if shared_experts is not None:
            weights, are_scored = routing.shared_weights, self.config.router_rule.scores_shared_experts
            out = shared_experts(inputs.router, *((weights,) if are_scored else ()))
            if weights is not None and not are_scored:
                out = out * weights.to(out.dtype)
            parts.append(out if gate is None else gate(inputs.router).sigmoid() * out)
        if self.zero_computation_experts is not None:
            parts.append(self.zero_computation_experts(inputs.router, routing.top_k, dtype))
        return None, sum_of(*parts) if parts else None

    @property
    def balanced_router(self) -> Router | None:
        """Router that updates the correction bias of the block; None without such a bias."""
        for router in self._balance:
            router.score_correction_bias = correction_bias_of(self, self._keys)
            return router
        return None

    @property
    def expert_dtype(self) -> torch.dtype:
        """Dtype of the matrices of the routed experts."""
        _, _, name = self._keys["experts.down_proj"].format(expert=0).partition(".")
        return attrgetter(name)(self.routed_experts).dtype  # type: ignore[no-any-return]


class ZayaMoE(TransformersMoE):
    """Layer of ZAYA, whose block takes and returns the state of its router, the last of the router's outputs."""

    def forward(  # type: ignore[override]
        self, x: Tensor, router_state: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Any:
        """Return output and state as `TransformersMoE.forward`; the model gives the state as the second argument."""
        return super().forward(x, token_mask, router_state)

    def _router_outputs(self, inputs: RouterInputs) -> Any:
        x, state = (None if rows is None else rows.view(*inputs.leading_dims, -1) for rows in (inputs.x, inputs.state))
        return self.part("router")(x, state)

    def _routing_of(self, outputs: Any, inputs: RouterInputs) -> Routing:
        return super()._routing_of(outputs, inputs)._replace(state=outputs[-1].flatten(0, -2))


class DeepseekV4MoE(TransformersMoE):
    """Layer of DeepSeek-V4, whose model gives the ids of the tokens to all blocks; few routers select by them."""

    def forward(  # type: ignore[override]
        self, x: Tensor, input_ids: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Any:
        """Return the output as `TransformersMoE.forward`; the model gives the ids as the second argument."""
        ids = None if self.config.router_rule.takes_ids is None else input_ids
        return super().forward(x, token_mask, router_inputs=ids)

    def _router_outputs(self, inputs: RouterInputs) -> Any:
        return super()._router_outputs(inputs) if inputs.ids is None else self.part("router")(inputs.x, inputs.ids)

    def _selected(self, outputs: Any, inputs: RouterInputs) -> Tensor | None:
        selected: Tensor | None = None if inputs.ids is None else outputs[2]
        return selected


class InklingMoE(TransformersMoE):
    """Layer of Inkling, whose router scores the shared experts and returns weights instead of their logits."""

    def _routing_of(self, outputs: Any, inputs: RouterInputs) -> Routing:
        if inputs.experts is not None:
            check_replayable(self.config, module_path(self))
        logits, weights, experts, shared_weights = outputs
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits, score_function = logits.to(wide), self.config.score_function
        _, experts, probabilities = route(logits, self.config.top_k, score_function=score_function, experts=experts)
        routing = Routing(logits, probabilities, weights.to(wide), experts, shared_weights=shared_weights)
        return routing if inputs.token_mask is None else routing.without_padding(inputs.token_mask)


class SwitchMoE(TransformersMoE):
    """Layer of Switch Transformers, whose router drops tokens of full experts, which still count for the losses."""

    def __init__(self, block: nn.Module, **training: Any) -> None:
        super().__init__(block, **training)
        self.part("router").classifier.to(self.part("router").dtype)  # as its first forward does, with gathered weights

    def _router_outputs(self, inputs: RouterInputs) -> Any:
        return self.part("router")(inputs.x.view(*inputs.leading_dims, -1))

    def _routing_of(self, outputs: Any, inputs: RouterInputs) -> Routing:
        routing, is_dropped = super()._routing_of(outputs, inputs), ~outputs[0].flatten(0, -2).any(1, keepdim=True)
        if inputs.experts is not None:  # a replay has been recorded without the slots of dropped tokens
            is_dropped &= chooses_itself(inputs.experts).unsqueeze(1)
        weights, experts = routing.weights.masked_fill(is_dropped, 0.0), routing.experts.masked_fill(is_dropped, -1)
        return routing._replace(weights=weights, experts=experts, is_unpadded=False)

    def losses_and_stats(self, routing: Routing, use: BufferUse, num_sequences: int) -> tuple[Tensor, MoEStats]:
        """Count the tokens that the router has dropped as well."""
        is_dropped, mask = routing.experts < 0, routing.token_mask
        dropped = use.dropped + (is_dropped if mask is None else is_dropped & mask.unsqueeze(1)).sum()
        return super().losses_and_stats(routing, use._replace(dropped=dropped), num_sequences)

    @property
    def declaration(self) -> Declaration:
        """Declare that the router counts the tokens of a sequence."""
        return replace(super().declaration, needs_whole_sequences=True)


class JetMoeMoE(TransformersMoE):
    """Layer of JetMoE, whose experts are two modules, and whose bias is added to the output."""

    bias: Tensor

    def expert_function(self) -> Callable[..., Tensor]:
        """Return a function of the two modules and the activation between them."""
        first, activation, second = map(self.get_submodule, ("input_linear", "activation", "output_linear"))

        def compute(x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
            gate, up = first(ragged_sort(x, plan), plan).chunk(2, dim=-1)
            return ragged_unsort(second(activation(gate) * up, plan), plan, weights).to(x.dtype)

        return compute

    def compute_others(self, inputs: LayerInputs, *_: Any) -> tuple[None, Tensor]:
        """Return the bias of each token."""
        return None, self.bias.expand_as(inputs.router)


# Families whose blocks compute more than router, experts and shared experts, by their preset.
_OF_FAMILIES: dict[str, type[TransformersMoE]] = {
    "deepseek_v4": DeepseekV4MoE,
    "inkling": InklingMoE,
    "jetmoe": JetMoeMoE,
    "switch_transformers": SwitchMoE,
    "zaya": ZayaMoE,
}


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


def correction_bias_of(block: nn.Module, keys: Mapping[str, str]) -> Tensor | None:
    """Return the correction bias ``(E,)`` of a block; `keys` has the block's name for each parameter of `MoE`."""
    if (key := keys.get("router.score_correction_bias")) is None:
        return None
    owner, _, name = key.rpartition(".")
    first, _, path = owner.partition(".")
    module = adapted_module(block.get_submodule(first)) if owner else block
    bias: Any = getattr(module.get_submodule(path), name, None)  # is optional in some layouts
    if bias is None:
        return None
    bias = bias.detach().flatten()  # Laguna has a parameter that is not trained, and ERNIE 4.5 one with another dim
    whole: Tensor = bias.to_local() if is_dtensor(bias) else bias  # on a mesh, on every rank
    return whole


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
    norms = config.norms
    if norms.output:  # gathered by the experts: its gradient is summed over the ranks of all
        experts: Any = block.get_submodule("experts")
        experts.post_expert_norm.declaration = Declaration(logical_names={"weight": ("norm",)})
    keys = {entry.names[0]: entry.key.partition(".")[2] for entry in entries}
    of_router: dict[str, tuple[str | None, ...]] = {}
    for path, part in make_router(config, device="meta").named_modules(prefix="router"):
        declared = declaration_of(part).logical_names
        of_router |= {keys[f"{path}.{name}"]: dims for name, dims in declared.items() if f"{path}.{name}" in keys}
    router.declaration = Declaration(logical_names=of_router, fsdp_unit=True)  # type: ignore[assignment]
