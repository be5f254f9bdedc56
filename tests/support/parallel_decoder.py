"""Decoders that every preset can spread over a few ranks, and the results of one training step of one process."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe import MoEConfig, ZeroComputation
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.sharding import LogicalRules, Mesh, PartitionSpec, logical_to_mesh_axes, parse_mesh, resolve

MOE = MoEConfig(
    hidden_size=16,
    intermediate_size=8,
    num_experts=8,
    top_k=2,
    router_bias=True,
    score_correction_bias=True,
    expert_bias=True,
    num_shared_experts=1,
    shared_expert_gate=True,
    load_balance_loss_weight=0.1,
    router_z_loss_weight=0.01,
)
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=16,
    moe=MOE,
    num_dense_layers=1,
    max_sequence_length=16,
)
BLOCK = replace(CONFIG, num_layers=1, num_dense_layers=0)  # for claims that do not depend on the number of blocks
BATCH, LENGTH = 8, 8


class MeshRules(NamedTuple):
    """A preset, and the sizes of a mesh to use it on."""

    rules: str
    sizes: dict[str, int]

    @classmethod
    def of(cls, text: str) -> "MeshRules":
        """Return the layout with this name, as "ep-as-dp,fsdp=2,expert=2"."""
        rules, _, sizes = text.partition(",")
        return cls(rules, parse_mesh(sizes))

    def __str__(self) -> str:
        return ",".join([self.rules, *(f"{axis}={size}" for axis, size in self.sizes.items())])

    @property
    def world_size(self) -> int:
        return Mesh.planned(self.sizes).num_ranks


def layouts(*world_sizes: int) -> list[MeshRules]:
    """Every preset on meshes with the axes of the preset."""
    return [layout for layout in LAYOUTS if layout.world_size in world_sizes]


_LAYOUTS = """
    default,tensor=2 pure-fsdp,fsdp=2 ep-as-dp,expert=2 ep-as-cp,expert=2 cp-as-ep,context=2
    pipeline-large-moe,expert=2 shard-exp-on-fsdp,fsdp=2 ep-tp,expert=2 fsdp-as-dp-for-attn,expert=2
    default,context=2,fsdp_transpose=2 default,fsdp=2,tensor=2 pure-fsdp,fsdp=4 ep-as-dp,fsdp=2,expert=2
    ep-as-cp,fsdp=2,expert=2 cp-as-ep,context=2,expert=2 pipeline-large-moe,expert=2,tensor=2
    shard-exp-on-fsdp,fsdp=2,expert=2 ep-tp,data=2,expert=2 fsdp-as-dp-for-attn,fsdp=2,expert=2
    default,fsdp=2,context=2,tensor=2 pure-fsdp,fsdp=8 ep-as-dp,fsdp=2,fsdp_transpose=2,expert=2
    ep-as-cp,data=2,fsdp=2,expert=2 cp-as-ep,fsdp=2,context=2,expert=2 pipeline-large-moe,fsdp=2,expert=2,tensor=2
    shard-exp-on-fsdp,fsdp=2,expert=4 ep-tp,data=2,expert=4
"""
LAYOUTS = [MeshRules.of(text) for text in _LAYOUTS.split()]

VARIANTS = {
    "every part": CONFIG,
    "recomputed, tied, dense, balanced over the batch, sizes that do not divide": replace(
        CONFIG,
        num_key_value_heads=1,
        intermediate_size=10,
        tie_embeddings=True,
        recompute=("blocks",),
        moe=replace(
            MOE,
            implementation="dense",
            intermediate_size=9,
            num_experts=6,
            shared_expert_gate=False,
            load_balance_scope="batch",
        ),
    ),
    "latent experts, and experts that compute nothing": replace(
        CONFIG, moe=replace(MOE, latent_size=4, zero_computation=ZeroComputation(zero=1, copy=2, constant=3), top_k=4)
    ),
    "latent experts alone": replace(
        CONFIG, moe=replace(MOE, latent_size=4, num_shared_experts=0, shared_expert_gate=False)
    ),
}


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    """A decoder with the same parameters at every call, large enough to matter."""
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise + (parameter.ndim == 1))
    return model


def batch(num_rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """Tokens and targets, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocab_size, (num_rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def token_spec(mesh: Mesh, rules: LogicalRules) -> PartitionSpec:
    """The spec of the tokens of a rank."""
    spec = logical_to_mesh_axes(("activation_batch", "activation_length"), rules)
    return resolve(spec, mesh.sizes, (BATCH, LENGTH), strict=True).spec


def loss(output: DecoderOutput, targets: Tensor) -> Tensor:
    """This rank's share of the mean over all tokens, and the auxiliary loss."""
    token_losses = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return token_losses / (BATCH * LENGTH) + output.aux_loss


class LocalSGD(torch.optim.Optimizer):
    """Gradient descent on the shards of this rank.

    torch.optim.SGD computes the same by operators of DTensor. Their first call with a shape takes every rank 0.2 s on
    a mesh of three dims.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                shard, gradient = (
                    tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    for tensor in (parameter, parameter.grad)
                )
                shard.sub_(group["lr"] * gradient)


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@functools.cache
def step_of_one_process(config: DecoderConfig) -> tuple[DecoderOutput, dict[str, Any]]:
    """The output and the gradients of one step."""
    model, (tokens, targets) = decoder(config), batch()
    output = model(tokens)
    loss(output, targets).backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}
