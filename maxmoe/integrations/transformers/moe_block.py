"""The layer in the place of a sparse block of transformers, made of the modules of the block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe.adapters import adapted_module
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import check_tensors_of, config_of_block, family_of_block
from maxmoe.declaration import Declaration, FusedGate
from maxmoe.integrations.transformers._transformers import experts_implementation, is_experts
from maxmoe.integrations.transformers.token_masks import mask_of_this_layer
from maxmoe.nn import Experts, MoE, MoEFeedForward, Router, Routing, ZeroComputationExperts, load_balance_loss
from maxmoe.nn.dispatcher import LayerInputs, sum_of
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import select_experts
from maxmoe.ops import RaggedPlan
from maxmoe.presets.layouts import Entry


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
    latent_out = _part("latent_out.weight")
    latent_projection, latent_norm = _part("latent_in.weight"), _part("latent_in.norm.weight")
    output_gate = _part("shared_experts.output_gate")

    def __init__(self, block: nn.Module, **training: Any) -> None:
        super(MoE, self).__init__()  # not of MoE, which makes its parts
        self.config = config = replace(config_of_block(block), **training)
        check_tensors_of(block, MoE(config, device="meta"), "replace_moe_blocks")
        self.family = family = family_of_block(block)
        self._keys = {entry.names[0]: entry.key for entry in family.block.entries}
        for name, module in block.named_children():
            setattr(self, name, module)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        has_more = config.has_zero_computation_outputs
        self.zero_computation_experts = ZeroComputationExperts(config, device="meta") if has_more else None
        self.set_up_training(load_balance_loss)
        # Updates the correction bias of the block. The tuple keeps it out of the state dict.
        self._balance = (Router(config, device="meta"),) if config.score_correction_bias else ()
        if is_experts(self.experts):
            self.experts.recompute_names, self.experts.recompute = Experts.recompute_names, Experts.recompute
        else:
            self.experts.uses_maxmoe = True  # type: ignore[assignment]  # read by patched_families.py
        _declare(self.router, self.experts, config, family.block.entries)
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

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Any:
        """Route the tokens and compute their experts.

        Args:
            x: ``(..., S, D)``, as in `MoE.forward`.
            token_mask: ``(..., S)``, bool, False for padding; None for the mask of the model that calls the layer.

        Returns:
            Output ``(..., S, D)``. In gpt-oss and Llama 4, whose models drop a second value, a tuple with None.
        """
        hidden_states = super().forward(x, mask_of_this_layer.value if token_mask is None else token_mask)
        return (hidden_states, None) if self.family.returns_scores else hidden_states

    def _route(self, x: Tensor, token_mask: Tensor | None, _leading_dims: object, given: Tensor | None) -> Routing:
        """Call the router of the block, whose output transformers records, and select experts by its logits."""
        router, bias = self.router, self._correction_bias
        is_outside = bias is not None and "." not in self._keys["router.score_correction_bias"]
        outputs = router(x, bias) if is_outside else router(x)
        if self.config.shared_expert_scores:
            return self._routed_with_shared(outputs, token_mask, given)
        logits = router_logits(router, outputs)
        try:
            return select_experts(self.config, logits, bias, token_mask, given)
        except ValueError as error:
            raise ValueError(f"{module_path(self)}: {error}") from error

    def _routed_with_shared(
        self, outputs: Sequence[Tensor], token_mask: Tensor | None, given: Tensor | None
    ) -> Routing:
        """Take experts and weights as the router of the block gives them; it has no logits of the shared experts."""
        if given is not None:
            check_replayable(self.config, module_path(self))
        logits, weights, experts, shared_weights = outputs
        wide = torch.promote_types(logits.dtype, torch.float32)
        routing = select_experts(replace(self.config, shared_expert_scores=False), logits.to(wide), None, None, experts)
        routing = routing._replace(weights=weights.to(wide), shared_weights=shared_weights, is_unpadded=True)
        return routing if token_mask is None else routing.without_padding(token_mask)

    def _expert_function(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan, *foreign: Any) -> Tensor:
        """Compute rows as `maxmoe.nn.Experts`, by a call of the experts of the block, around which adapters may lie."""
        experts: Any = self.routed_experts
        if is_experts(experts) and experts_implementation(experts.config) != "maxmoe":
            raise ValueError(
                f"{module_path(self)}: the experts implementation of a model with replaced blocks must be 'maxmoe', "
                f"got {experts_implementation(experts.config)!r}"
            )
        rows: Tensor = self.experts(x, plan, weights, *foreign)
        return rows

    def _compute_others(
        self, inputs: LayerInputs, _token_mask: Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> tuple[None, Tensor | None]:
        """Compute the shared and the zero-computation experts, which every process has whole."""
        shared_experts, output_gate = self.shared_experts, self.output_gate
        parts = []
        if shared_experts is not None:
            weights = () if routing.shared_weights is None else (routing.shared_weights,)
            out = shared_experts(inputs.router, *weights)
            parts.append(out if output_gate is None else output_gate(inputs.router).sigmoid() * out)
        if self.zero_computation_experts is not None:
            parts.append(self.zero_computation_experts(inputs.router, routing.top_k, dtype))
        return None, sum_of(*parts) if parts else None

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
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.routed_experts.down_proj.dtype  # type: ignore[assignment]
        return dtype


def check_replayable(config: MoEConfig, block: str) -> None:
    """Raise if the router of a block returns too little to weigh the experts of a replay."""
    if config.shared_expert_scores:
        raise ValueError(
            f"{block}: replay_routing needs the logits of the shared experts, which the router of this block does not "
            "return: replay in maxmoe.MoE, see MoE.from_transformers"
        )


def router_logits(router: nn.Module, outputs: Any) -> Tensor:
    """Return the logits ``(T, E)``, float32 or wider, among the outputs of the router of a block."""
    logits: Tensor = outputs[1 if isinstance(adapted_module(router), nn.Linear) else 0]  # second in Llama 4
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def correction_bias_of(block: nn.Module, keys: Mapping[str, str]) -> Tensor:
    """Return the correction bias ``(E,)`` of a block, given its names of the parameters of a layer."""
    *owner, name = keys["router.score_correction_bias"].split(".")
    return (adapted_module(block.get_submodule(owner[0])) if owner else block).get_buffer(name)


def _declare(router: nn.Module, experts: nn.Module, config: MoEConfig, entries: Sequence[Entry]) -> None:
    """Declare router and experts of a block as `MoE` does, with the names and layouts of the block's parameters.

    If gate and up are concatenated, they cannot be computed in parts: a shard would hold one of them alone. A stack
    with unused matrices cannot be sharded by experts.
    """
    of_ours = Experts(config, device="meta").declaration
    names: dict[str, tuple[str | None, ...]] = {}
    input_dims: dict[str, str] = {}
    fused: dict[str, FusedGate] = {}
    of_experts = [entry for entry in entries if entry.is_of_experts]
    is_sharded = not any(entry.has_unused_matrices for entry in of_experts)
    for entry in of_experts:
        name, ours = entry.key.removeprefix("experts."), entry.names[0].removeprefix("experts.")
        expert, *dims = of_ours.logical_names[ours]
        names[name] = (expert if is_sharded else None, *(reversed(dims) if entry.transposed else dims))
        if ours in of_ours.input_dims:
            input_dims[name] = of_ours.input_dims[ours]
            if len(entry.names) > 1:
                fused[name] = "interleaved" if entry.interleaved else "concatenated"
    experts.declaration = replace(  # type: ignore[assignment]
        of_ours,
        logical_names=names,
        input_dims=input_dims,
        fused_gates=fused,
        tensor_parallel_dims={} if "concatenated" in fused.values() else of_ours.tensor_parallel_dims,
        added_to_output=tuple(name for name in ("down_proj_bias",) if name in names),
    )
    if config.expert_norm:  # the experts gather it, so that its gradient is summed over the ranks of all experts
        experts.post_expert_norm.declaration = Declaration(logical_names={"weight": ("norm",)})  # type: ignore
    keys = {entry.names[0]: entry.key.partition(".")[2] for entry in entries}
    of_router = {"router.weight": (None, "embed"), "router.bias": (None,), "router.scale": (None,)}
    router.declaration = Declaration(  # type: ignore[assignment]
        logical_names={keys[name]: dims for name, dims in of_router.items() if name in keys}, fsdp_unit=True
    )
