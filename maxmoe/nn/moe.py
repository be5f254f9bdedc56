"""Mixture-of-Experts layer."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe._torch import register_namedtuple, reshaped
from maxmoe.adapters import without_adapters
from maxmoe.config import MoEConfig
from maxmoe.conversion import check_block, config_of_block, give_weights, take_weights
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.load.metrics_accumulator import MetricsAccumulator
from maxmoe.load.stats import MoEStats
from maxmoe.nn.dense_dispatcher import local_dispatcher
from maxmoe.nn.dispatcher import ExpertRunner
from maxmoe.nn.experts import Experts
from maxmoe.nn.losses import RoutingLosses
from maxmoe.nn.router import Router
from maxmoe.nn.shared_experts import SharedExperts
from maxmoe.token_group import LocalTokens, TokenGroup


class MoEOutput(NamedTuple):
    """Output of a `MoE` layer.

    Attributes:
        hidden_states: ``(..., S, D)``, shape and dtype of the input.
        aux_loss: ``()``, float32 or wider, sum of the weighted auxiliary losses, to be added to the training loss.
        stats: routing statistics of the call.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: MoEStats


# torch.export.save requires a serialized type name.
register_namedtuple(MoEOutput, "maxmoe.MoEOutput")


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer.

    hidden_states[t] = sum_k weights[t, k] * expert[experts[t, k]](x[t]) + shared_experts(x[t])

    The forward does not change the state of the layer, so that a recomputation under activation checkpointing neither
    routes differently nor counts twice. The training loop calls `update_correction_bias` after the optimizer step.

    Args:
        config: sizes, routing, experts and losses of the layer.
        device: device of the parameters, which may be "meta".
        dtype: dtype of the parameters.

    Raises:
        TypeError: if the config is not a `MoEConfig`.
    """

    recompute_names = ("dispatch",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
        self.config = config
        self.router = Router(config, device=device, dtype=dtype)
        self.experts = Experts(config, device=device, dtype=dtype)
        self.shared_experts = SharedExperts(config, device=device, dtype=dtype) if config.num_shared_experts else None
        self.runner = ExpertRunner(local_dispatcher(config))
        self.losses = RoutingLosses(config)
        self.token_group: TokenGroup = LocalTokens()
        self.metrics_accumulator: MetricsAccumulator | None = None  # set by StatsAccumulator

    @classmethod
    def from_transformers(cls, block: nn.Module) -> Self:
        """Create a layer from the sparse block of a transformers model.

        The weights are moved, one tensor at a time, and the block is left on the meta device. Gradients are not moved.

        Args:
            block: sparse block of a family in `maxmoe.presets`, such as `MixtralSparseMoeBlock`.

        Returns:
            Layer with the dtypes, device and `requires_grad` of the block.

        Raises:
            ValueError: for a block of another family or kind; no tensor is moved then.
        """
        dtype = next((parameter.dtype for parameter in block.parameters()), None)
        layer = cls(config_of_block(block), device="meta", dtype=dtype)
        take_weights(layer, block)
        return layer.train(block.training)

    def to_transformers(self, block: nn.Module) -> None:
        """Move the weights of this layer to the sparse block of a transformers model.

        The weights are moved, one tensor at a time, and the layer is left on the meta device. Gradients are not moved.

        Args:
            block: sparse block of a family in `maxmoe.presets`. Its own weights are dropped; they may be on the meta
                device.

        Raises:
            ValueError: if the block computes another function or has other shapes; no tensor is moved then.
        """
        check_block(self.config, block)
        give_weights(self, block)

    def set_runner(self, runner: ExpertRunner) -> None:
        """Replace the runner of the routed experts; `maxmoe.parallelize` sets a runner that communicates.

        Args:
            runner: runner with dispatcher, tensor-parallel region and number of chunks.
        """
        self.runner = runner

    def reset_parameters(self) -> None:
        """Initialize all parameters."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters()

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        """Route the tokens and compute their experts.

        Padding is not routed: its output and its gradient are zero, it does not contribute to losses, statistics or
        capacities, and its values, which may be NaN, affect no result. The bound of `buffer_factor` counts padding.

        Args:
            x: ``(..., S, D)``, floating, sequences of S tokens; ``(T, D)`` is one sequence.
            token_mask: ``(..., S)``, bool, False for padding; None for no padding.

        Returns:
            Hidden states, auxiliary loss and routing statistics.

        Raises:
            ValueError: if the last dim of x is not `hidden_size`, x does not have the dtype of the parameters, or the
                mask is not bool or has another shape.
        """
        self._check(x, token_mask)
        num_sequences = math.prod(x.shape[:-2])
        tokens = x.reshape(-1, x.shape[-1])
        if token_mask is not None:
            token_mask = token_mask.reshape(-1)
            # Zeroed before the first product, so that NaN in padding reaches neither outputs nor gradients.
            tokens = tokens.masked_fill(~token_mask.unsqueeze(1), 0.0)
        region = self.runner.region
        # One tensor per part of the layer, because the gradients of the parts are reduced differently.
        inputs = region.enter(tokens)
        routing = self.router(inputs.router, token_mask)
        routed, dropped = self.runner.run(
            self.experts,
            inputs.experts,
            region.assign(routing.top_k),
            num_sequences=num_sequences,
            recompute="dispatch" in self.recompute,
        )
        shared = None if self.shared_experts is None else self.shared_experts(inputs.shared_experts, token_mask)
        # The region sums the partial outputs of both, in one collective if they are partial over the same axes.
        hidden_states = region.leave(routed, shared)
        dropped = region.all_reduce_dropped(dropped)
        aux_loss, stats = self.losses(routing, dropped, num_sequences, self.token_group)
        if self.metrics_accumulator is not None:
            hidden_states = self.metrics_accumulator.add(hidden_states, aux_loss, stats)
        # A view would lose the backward hook that FSDP registers on this tensor.
        hidden_states = reshaped(hidden_states.contiguous(), (*x.shape[:-1], hidden_states.shape[1]))
        return MoEOutput(hidden_states, aux_loss, stats)

    @property
    def declaration(self) -> Declaration:
        """Declare the token group and saved tensors; router and experts declare their parameters."""
        return Declaration(
            uses_token_group=True,
            # The capacity of an expert is per sequence, and filled in the order of the tokens.
            needs_whole_sequences=self.config.capacity_factor is not None,
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        config, wide = self.config, torch.promote_types(self._dtype, torch.float32)
        saved = {"input": SavedTensor((batch, length, config.hidden_size), (*TOKEN_DIMS, None))}
        if config.router_z_loss_weight > 0:
            saved["logsumexp"] = SavedTensor((batch, length), TOKEN_DIMS, wide)
        if config.load_balance_loss_weight > 0:
            rows, name = (batch, TOKEN_DIMS[0]) if config.load_balance_scope == "sequence" else (1, None)
            saved["frequencies"] = SavedTensor((rows, config.num_experts), (name, None), wide)
            saved["lengths"] = SavedTensor((rows,), (name,), wide)
            saved["num_sequences"] = SavedTensor((), (), wide)
        return saved

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Take one step of loss-free balancing; see `Router.update_correction_bias`.

        Args:
            tokens_per_expert: ``(E,)``, integer, `MoEStats.tokens_per_expert`, summed over the micro-batches of an
                optimizer step.
        """
        without_adapters(self.router, Router).update_correction_bias(tokens_per_expert)

    @property
    def routed_experts(self) -> Experts:
        """Module of the routed experts, without adapters that wrap it."""
        return without_adapters(self.experts, Experts)

    @property
    def _dtype(self) -> torch.dtype:
        return self.routed_experts.up_proj.dtype

    def _check(self, x: Tensor, token_mask: Tensor | None) -> None:
        hidden_size = self.config.hidden_size
        if x.dim() < 2 or x.shape[-1] != hidden_size:
            raise ValueError(f"x must have shape [..., S, hidden_size ({hidden_size})], got {tuple(x.shape)}")
        if x.dtype != self._dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"x must have the dtype of the parameters ({self._dtype}) outside of autocast, got {x.dtype}"
            )
        if token_mask is not None and (token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]):
            raise ValueError(
                f"token_mask must be bool of shape {tuple(x.shape[:-1])}, "
                f"got {token_mask.dtype} of shape {tuple(token_mask.shape)}"
            )

    def extra_repr(self) -> str:
        """Return the fields of the config that differ from their default."""
        fields = dataclasses.fields(self.config)
        changed = (field.name for field in fields if getattr(self.config, field.name) != field.default)
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
