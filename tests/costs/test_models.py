"""`maxmoe.costs.estimate` of models as users write them, against a real step in one process."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.costs import Estimate, estimate
from maxmoe.costs.measured import Work
from maxmoe.costs.step import default_loss
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import parallelize
from maxmoe.ranks.named_collectives import CHECK_VARIABLE
from maxmoe.sharding import Mesh
from support.memory import num_bytes, saved_for_backward
from support.run_ranks import run_ranks

ONE_RANK = Mesh.planned({})
MOE = MoEConfig(hidden_size=32, intermediate_size=48, num_experts=4, top_k=2, load_balance_loss_weight=0.01)
VOCABULARY = 61


class UserModel(NamedTuple):
    """A model, and the arguments of its forward for a number of sequences and their length."""

    model: nn.Module
    arguments: Callable[[int, int], tuple[Tensor, ...]]


def ids(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (batch, length)),)


def hidden_states(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, length, 32),)


class Attention(nn.Module):
    """Causal attention, written out as products."""

    def __init__(self) -> None:
        super().__init__()
        self.queries_keys_values, self.output = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.queries_keys_values(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = (queries @ keys.mT / 8**0.5).masked_fill(~self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        values = self.dropout(scores.softmax(-1)) @ values
        out: Tensor = self.output(values.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.mixer = nn.LayerNorm(32), Attention()
        self.norm_2, self.feed_forward = nn.LayerNorm(32), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))  # type: ignore[no-any-return]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))


class LanguageModel(nn.Module):
    """Takes token ids and optional targets; any blocks; the output layer shares the weight of the embedding if tied."""

    def __init__(self, *blocks: nn.Module, is_tied: bool = False, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(32)
        self.output = nn.Linear(32, VOCABULARY, bias=False)
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


LENGTH = 24


def estimated(user: UserModel) -> Estimate:
    return estimate(user.model, ONE_RANK, "ep-as-dp", batch_size=4, sequence_length=LENGTH, allow_unused=True)


def real_peak(model: nn.Module, arguments: tuple[Tensor, ...]) -> int:
    """Bytes that torch's profiler sees allocated at most in a step, with gradients that are there already."""
    model = parallelize(model, Mesh({"data": 1}), allow_unused=True).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        default_loss(model(*arguments)).backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def decoder(dtype: torch.dtype = torch.float32, **changes: Any) -> UserModel:
    moe = MoEConfig(hidden_size=64, intermediate_size=48, num_experts=8, top_k=2, load_balance_loss_weight=0.01)
    sizes: dict[str, Any] = {"num_layers": 2, "num_dense_layers": 1, "num_heads": 4, "intermediate_size": 160}
    config = DecoderConfig(vocab_size=61, hidden_size=64, moe=moe, max_sequence_length=64, **sizes, **changes)
    return UserModel(Decoder(config, dtype=dtype), ids)


def replaced() -> UserModel:
    """A model of transformers whose MoE blocks are computed by this library."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from maxmoe.integrations.transformers import replace_moe_blocks

    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    replace_moe_blocks(model)
    return UserModel(model, ids)


def gpt(num_layers: int = 3, **options: Any) -> UserModel:
    return UserModel(LanguageModel(*(Block(dense()) for _ in range(num_layers)), **options), ids)


MODELS: dict[str, Callable[[], UserModel]] = {
    "GPT, attention written out": gpt,
    "checkpointed blocks": partial(gpt, is_checkpointed=True),
    "tied embeddings, MoE in each second block": lambda: UserModel(
        LanguageModel(Block(dense()), Block(MoEFeedForward(MOE)), Block(dense()), is_tied=True), ids
    ),
    "decoder, bfloat16": partial(decoder, torch.bfloat16),
    "experts recomputed": partial(decoder, recompute=("experts",)),
    "blocks recomputed": partial(decoder, recompute=("blocks",)),
    "replaced blocks of transformers": replaced,
}


def test_memory_is_what_autograd_saves_and_torch_allocates() -> None:
    """The model is as it was afterwards."""
    pytest.importorskip("transformers")
    users, planned, kept = {name: make() for name, make in MODELS.items()}, {}, {}
    for name, user in users.items():
        user.model.eval()
        state = {name: tensor.clone() for name, tensor in user.model.state_dict().items()}
        modules = [(module.training, len(module._forward_hooks)) for module in user.model.modules()]
        planned[name] = estimated(user).memory
        assert modules == [(module.training, len(module._forward_hooks)) for module in user.model.modules()]
        assert all(torch.equal(tensor, state[name]) for name, tensor in user.model.state_dict().items())
        assert all(parameter.grad is None and not parameter.is_meta for parameter in user.model.parameters())
        user.model.train()
        with saved_for_backward([*user.model.parameters(), *user.model.buffers()]) as tensors:
            default_loss(user.model(*user.arguments(4, LENGTH)))
        kept[name] = num_bytes(tensors)
    assert {name: memory["activations"] for name, memory in planned.items()} == pytest.approx(kept, rel=1e-3)

    def peaks() -> dict[str, int]:
        return {name: real_peak(user.model, user.arguments(4, LENGTH)) for name, user in users.items()}

    (real,) = run_ranks(peaks, 1)
    found = {name: memory["activations"] + memory["temporary"] for name, memory in planned.items()}
    assert found == pytest.approx(real, rel=0.03)


def test_flops_are_what_torch_counts() -> None:
    """torch's counter leaves out its attention on the CPU: here attention is written out as products."""
    user = gpt(1)
    with FlopCounterMode(display=False) as counter:
        default_loss(user.model(*user.arguments(4, LENGTH))).backward()
    assert estimated(user).flops == counter.get_total_flops()


def test_flops_of_experts_are_products_with_the_rows() -> None:
    tokens, (model, *_) = 4 * LENGTH, decoder()
    moe, config = model.blocks[-1].feed_forward, model.config
    experts = 2 * config.moe.top_k * 3 * config.moe.hidden_size * config.moe.intermediate_size
    per_token = experts + 2 * moe.router.weight.numel()
    sizes: dict[str, Any] = {"batch_size": 4, "sequence_length": LENGTH}
    for requires_grad in (True, False):
        make = lambda *shape, wanted=requires_grad: (torch.empty(*shape, 64, requires_grad=wanted),)  # noqa: E731
        found = estimate(moe, ONE_RANK, "ep-as-dp", inputs=make, allow_unused=True, **sizes).flops
        # Without a gradient of x, gate, up and router have no product for it.
        gradients_of_x = 2 * moe.router.weight.numel() + experts * 2 // 3
        assert found == tokens * (3 * per_token - (0 if requires_grad else gradients_of_x))


def test_an_operator_moves_its_tensors_and_a_view_nothing() -> None:
    model, tokens = nn.Sequential(nn.Linear(32, 16, bias=False)), 4 * LENGTH
    alone = estimated(UserModel(model, hidden_states)).ranks[0].work
    assert Work(2 * tokens * 32 * 16, 4 * (tokens * 32 + 32 * 16 + tokens * 16)) in alone
    assert estimated(UserModel(model.append(nn.Unflatten(-1, (2, 8))), hidden_states)).ranks[0].work == alone


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.moe = nn.Embedding(61, 32), MoEFeedForward(MOE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.moe(x) if x.max() > 3 else x  # type: ignore[no-any-return]


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, length: int) -> Tensor:
        return self.linear(x[:, :length])  # type: ignore[no-any-return]


def test_what_cannot_be_measured_names_the_module_and_the_operator() -> None:
    message = r"a step of Sequential cannot be measured .* because of 0: .*aten\._local_scalar_dense"
    with pytest.raises(ValueError, match=message):
        estimated(UserModel(nn.Sequential(ReadsValues()), ids))
    with pytest.raises(ValueError, match=r"a step of TakesMore cannot be measured .* give `inputs`"):
        estimated(UserModel(TakesMore(), hidden_states))
    inputs = {"inputs": lambda *sizes: (torch.empty(*sizes, 32), 8)}
    sizes: dict[str, Any] = {"batch_size": 4, "sequence_length": LENGTH}
    assert estimate(TakesMore(), ONE_RANK, "pure-fsdp", allow_unused=True, **sizes, **inputs).flops > 0
    with pytest.raises(ValueError, match="inputs must return a tuple or a dict of arguments, got FakeTensor"):
        estimate(TakesMore(), ONE_RANK, "pure-fsdp", inputs=lambda *sizes: torch.ones(1), **sizes)


def test_a_real_mesh_is_not_the_fake_one() -> None:
    """Both are equal to torch, which caches shardings of results; collectives are compared with real ranks alone."""
    step: dict[str, Any] = {"batch_size": 8, "sequence_length": LENGTH}

    def check() -> None:
        os.environ[CHECK_VARIABLE] = "1"
        mesh, user = Mesh({"expert": 2}), decoder()
        whole = {name: parameter.detach().clone() for name, parameter in user.model.named_parameters()}
        before = dist.get_rank(), dist.get_world_size(), mesh.process_group("expert").group_name
        estimate(user.model, Mesh.planned({"expert": 2}), "ep-as-dp", optimizer="muon", **step)
        assert before == (dist.get_rank(), dist.get_world_size(), mesh.process_group("expert").group_name)
        total = torch.ones(2) * (1 + dist.get_rank())
        dist.all_reduce(total, group=mesh.process_group("expert"))
        assert total.eq(3).all()
        parallelize(user.model, mesh, "ep-as-dp")
        parts = {name: parameter.detach() for name, parameter in user.model.named_parameters()}
        sharded = {name: part for name, part in parts.items() if isinstance(part, DTensor)}
        assert sharded and all(part.full_tensor().equal(whole[name]) for name, part in sharded.items())

    run_ranks(check, 2)


def test_estimates_do_not_depend_on_groups_that_torch_unregisters() -> None:
    """torch unregisters all groups, also the groups of fake worlds."""
    moe, sizes = MoEFeedForward(MOE), {"batch_size": 8, "sequence_length": LENGTH}
    found = [estimate(moe, Mesh.planned({"expert": 4}), "ep-as-dp", **sizes)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    found += [estimate(moe, Mesh.planned({"expert": 4}), "ep-as-dp", **sizes)]
    assert found[0] == found[1] and not dist.is_initialized()
