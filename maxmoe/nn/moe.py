"""The Mixture-of-Experts layer."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe import presets
from maxmoe.config import MoEConfig
from maxmoe.nn.compute import compute_for
from maxmoe.nn.conversion import check_config, config_of, give_weights, take_weights
from maxmoe.nn.experts import Experts, SharedExperts
from maxmoe.nn.losses import at_least_one, load_balance_loss, normalized_scores, router_z_loss
from maxmoe.nn.parallel import TOKENS, Activation, AsOneSequence, TokenLayout, TokenSums, WholeBatch
from maxmoe.nn.router import Router, Routing
from maxmoe.presets.families import family_of


class MoEStats(NamedTuple):
    """What one call of the layer did, as tensors: reading them is the caller's synchronisation.

    Attributes:
        tokens_per_expert: ``(E,)``, int64; routed slots of each expert, those dropped later included.
        dropped: ``()``, int64; slots that capacity_factor or buffer_factor left out.
        router_entropy: ``()``; mean entropy of the normalised scores in nats, log(E) at most.
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    router_entropy: Tensor

    @property
    def load_max_over_mean(self) -> Tensor:
        """Load of the busiest expert over the mean load: 1 in perfect balance, E at worst."""
        load = self.tokens_per_expert.to(torch.float32)
        return load.max() / load.mean().clamp_min(1e-20)

    @property
    def dead_expert_fraction(self) -> Tensor:
        """Share of the experts that got no token."""
        return (self.tokens_per_expert == 0).to(torch.float32).mean()


class MoEOutput(NamedTuple):
    """What the layer returns.

    Attributes:
        hidden_states: shape of the input.
        aux_loss: ``()``, float32 or wider; the weighted losses on the routing, to be added to the training loss.
        stats: see `MoEStats`.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: MoEStats


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer.

    hidden_states[t] = sum_k weights[t, k] * expert[experts[t, k]](x[t]) + shared_experts(x[t])

    The forward pass changes nothing in the layer, so that activation checkpointing can neither route differently nor
    count anything twice. `update_correction_bias` is for the training loop to call, after the optimizer's step.

    Args:
        config: sizes, routing, experts, losses.
        device: of the parameters, "meta" included.
        dtype: of the parameters.
    """

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, device=device, dtype=dtype)
        self.experts = Experts(config, device=device, dtype=dtype)
        self.shared_experts = SharedExperts(config, device=device, dtype=dtype) if config.num_shared_experts else None
        self.compute = compute_for(config)
        self.parallel_dims: dict[str, int] = {}
        self.token_layout: TokenLayout = WholeBatch()

    @classmethod
    def from_transformers(cls, block: nn.Module) -> Self:
        """Turn the sparse block of a model of transformers into this layer.

        The weights move, one tensor at a time: the block is left on the meta device. Gradients stay behind.

        Args:
            block: of a family in `maxmoe.presets`, such as `MixtralSparseMoeBlock`.

        Returns:
            The layer; dtypes, device and `requires_grad` are those of the block.

        Raises:
            ValueError: for a block of another family or kind; then nothing is moved.
        """
        source = config_of(block)
        dtype = next((parameter.dtype for parameter in block.parameters()), None)
        layer = cls(presets.from_transformers(source), device="meta", dtype=dtype)
        take_weights(layer, block, family_of(source).block)
        return layer.train(block.training)

    def to_transformers(self, block: nn.Module) -> None:
        """Turn this layer back into the sparse block of a model of transformers.

        The weights move, one tensor at a time: the layer is left on the meta device. Gradients stay behind.

        Args:
            block: of a family in `maxmoe.presets`; its own weights are dropped, and may be on the meta device.

        Raises:
            ValueError: if the block computes something else or has other shapes; then nothing is moved.
        """
        source = config_of(block)
        check_config(self.config, presets.from_transformers(source))
        give_weights(self, block, family_of(source).block)

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether the output depends on how many tokens of a sequence are in this process."""
        return self.config.capacity_factor is not None

    def reset_parameters(self) -> None:
        """Initialise all parameters anew."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters()

    def forward(self, x: Tensor) -> MoEOutput:
        """Route the tokens and compute their experts.

        Args:
            x: ``(..., S, D)``, floating: sequences of S tokens; ``(T, D)`` is one sequence.

        Returns:
            The output.

        Raises:
            ValueError: if the last dim of x is not `hidden_size`, or its dtype not that of the parameters.
        """
        self._check(x)
        num_sequences = math.prod(x.shape[:-2])
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        hidden_states, dropped = self.compute(tokens, routing, self.experts, num_sequences)
        if self.shared_experts is not None:
            hidden_states = hidden_states + self.shared_experts(tokens)
        aux_loss, stats = self._assess(routing, dropped, num_sequences)
        # Not a view, which an operator in place would separate from what FSDP has hung on this output.
        hidden_states = torch.ops.aten._unsafe_view(hidden_states.contiguous(), x.shape)
        return MoEOutput(hidden_states, aux_loss, stats)

    def kept_for_backward(self, batch: int, length: int) -> dict[str, Activation]:
        """See `Activation`."""
        config, wide = self.config, torch.promote_types(self.experts.up_proj.dtype, torch.float32)
        kept = {"input": Activation((batch, length, config.hidden_size), (*TOKENS, "activation_embed"))}
        if config.load_balance_loss_weight > 0:
            kept["probabilities"] = Activation((batch, length, config.num_experts), (*TOKENS, None), wide)
        if config.router_z_loss_weight > 0:
            kept["log_sums"] = Activation((batch, length), TOKENS, wide)
        return kept

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """One step of the loss-free balancing; see `Router.update_correction_bias`.

        Args:
            tokens_per_expert: ``(E,)``, from the stats; summed over the micro-batches of the optimizer step.
        """
        self.router.update_correction_bias(tokens_per_expert)

    def _check(self, x: Tensor) -> None:
        hidden_size = self.config.hidden_size
        if x.dim() < 2 or x.shape[-1] != hidden_size:
            raise ValueError(f"x must have shape [..., S, hidden_size ({hidden_size})], got {tuple(x.shape)}")
        dtype = self.experts.up_proj.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x must have the dtype of the parameters ({dtype}) outside of autocast, got {x.dtype}")

    def _assess(self, routing: Routing, dropped: Tensor, num_sequences: int) -> tuple[Tensor, MoEStats]:
        """Losses and statistics of the routing."""
        config = self.config
        num_experts = config.num_experts
        has_balance_loss = config.load_balance_loss_weight > 0
        logits = routing.logits if has_balance_loss else routing.logits.detach()
        probabilities = normalized_scores(logits, config.score_function)
        length = routing.logits.shape[0] // max(num_sequences, 1)
        experts = routing.experts.reshape(num_sequences, length * config.top_k)
        counts = experts.new_zeros(num_sequences, num_experts)
        counts = counts.scatter_add(1, experts, torch.ones_like(experts))
        total = AsOneSequence(self.token_layout)

        aux_loss = routing.logits.new_zeros(())
        if has_balance_loss:
            sums: TokenSums = self.token_layout
            tokens_per_expert = counts
            if config.load_balance_scope == "batch":
                sums, num_sequences, length = total, 1, routing.logits.shape[0]
                tokens_per_expert = counts.sum(0, keepdim=True)
            by_sequence = probabilities.view(num_sequences, length, num_experts)
            balance_loss = load_balance_loss(by_sequence, tokens_per_expert, config.top_k, sums=sums)
            aux_loss = aux_loss + config.load_balance_loss_weight * balance_loss
        if config.router_z_loss_weight > 0:
            z_loss = router_z_loss(routing.logits, sums=self.token_layout)
            aux_loss = aux_loss + config.router_z_loss_weight * z_loss

        entropy = torch.special.entr(probabilities.detach()).sum()
        load, dropped, entropy, num_tokens = total.sum_within_sequences(
            counts.sum(0), dropped, entropy, routing.logits.shape[0]
        )
        return aux_loss, MoEStats(load, dropped, entropy / at_least_one(num_tokens))

    def extra_repr(self) -> str:
        """The fields of the config that are not at their default, for `print`.

        Returns:
            One line.
        """
        fields = dataclasses.fields(self.config)
        changed = (field.name for field in fields if getattr(self.config, field.name) != field.default)
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
