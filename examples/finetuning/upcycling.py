"""A dense model of transformers, the MoE model that is made from it, and the training of both on the same batches."""

import copy
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import maxmoe
from pretraining import InputError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ModelRun:
    """A model, its optimizer and its losses.

    Args:
        name: name for the table and the picture.
        model: model of transformers.
        first_step: number of steps of the run before this one began.
    """

    def __init__(self, name: str, model: PreTrainedModel, first_step: int = 0) -> None:
        self.name, self.model, self.first_step = name, model, first_step
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, learning_rate: float) -> float:
        """Take an optimizer step and return its loss in nats per token, without the load balance loss.

        Raises:
            InputError: if the loss is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        start = time.perf_counter()
        try:
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        except ValueError as error:  # the router refuses NaN logits
            raise InputError(f"{self.name}: {error}, try a smaller --learning-rate") from error
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        if not math.isfinite(loss.item()):
            raise InputError(f"{self.name}: the loss is {loss.item()}, try a smaller --learning-rate")
        self.losses.append(loss.item())
        return self.losses[-1]


def dense_model(options: Namespace) -> PreTrainedModel:
    """Return the model in the folder `--checkpoint`, or a small Llama with random weights.

    Raises:
        InputError: if the model cannot be loaded or built, or has no gated feed-forward blocks.
    """
    if options.checkpoint and not options.checkpoint.is_dir():  # transformers would ask its hub
        raise InputError(f"--checkpoint {options.checkpoint}: no such folder")
    torch.manual_seed(options.seed)
    model: PreTrainedModel
    try:
        if options.checkpoint:
            model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32, local_files_only=True)
        else:
            model = LlamaForCausalLM(_small_config(options))
    except Exception as error:  # transformers raises many types
        raise InputError(f"cannot make the dense model: {' '.join(str(error).split())}") from error
    if not any(True for _ in dense_blocks(model)):
        raise InputError(f"{type(model).__name__} has no blocks with gate_proj, up_proj and down_proj of nn.Linear")
    return model


def _small_config(options: Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=4,
        max_position_embeddings=max(2048, options.sequence_length),
        bos_token_id=None,
        eos_token_id=None,
    )


def dense_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the gated feed-forward blocks of a model, with the parent module of each and its attribute name."""
    for owner in list(model.modules()):
        for name, block in list(owner.named_children()):
            if all(isinstance(getattr(block, projection, None), nn.Linear) for projection in PROJECTIONS):
                yield owner, name, block


def upcycled(dense: PreTrainedModel, options: Namespace) -> PreTrainedModel:
    """Return a copy of a dense model with MoE layers in the place of its feed-forward blocks.

    Raises:
        InputError: for sizes that do not fit.
    """
    model = copy.deepcopy(dense)
    torch.manual_seed(options.seed)
    try:
        for owner, name, block in dense_blocks(model):
            setattr(owner, name, _moe_layer(block, dense.config.hidden_act, options))
    except ValueError as error:
        raise InputError(f"cannot make a MoE model of the dense one: {error}") from error
    return model


def _moe_layer(block: Any, activation: Any, options: Namespace) -> maxmoe.MoEFeedForward:
    width = block.up_proj.out_features
    if width % options.slices:
        raise InputError(f"--slices {options.slices} must divide the width of the dense blocks, {width}")
    config = maxmoe.MoEConfig(
        hidden_size=block.up_proj.in_features,
        intermediate_size=width // options.slices,
        num_experts=options.num_experts,
        top_k=options.top_k,
        activation=activation,
        expert_bias=block.down_proj.bias is not None,
        load_balance_loss_weight=0.01,
    )
    return maxmoe.MoEFeedForward.from_dense(
        config,
        block.gate_proj,
        block.up_proj,
        block.down_proj,
        scaling=options.scaling,
        noise=options.noise,
        reinitialized=options.reinitialized,
    )


@torch.no_grad()
def difference(one: PreTrainedModel, other: PreTrainedModel, tokens: Tensor) -> float:
    """Return the largest difference of the logits of two models, divided by the largest logit of the first one."""
    logits, others = one(input_ids=tokens).logits, other(input_ids=tokens).logits
    return float((logits - others).abs().max() / logits.abs().max())


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters of a model and the number that a token uses."""
    total = used = sum(parameter.numel() for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(layer, maxmoe.MoE):
            experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            used -= experts - experts * layer.config.top_k // layer.config.num_experts
    return total, used
