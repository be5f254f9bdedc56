"""Planned memory and FLOPs of a user's model, against a real forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maxmoe import MoEFeedForward, parallelize
from maxmoe.nn import Checkpointed
from maxmoe.parallel import Declaration
from maxmoe.planning import estimate, predict, search
from maxmoe.sharding import Mesh
from support.measured_step import kept_tensors, num_bytes
from support.models_of_users import LENGTH, MODELS, MOE, Attention, Block, LanguageModel, dense, hidden_states, ids
from support.run_ranks import run_ranks

ONE_RANK = Mesh.planned({})


def activations(model: nn.Module, batch_size: int, mesh: Mesh = ONE_RANK, rules: str = "ep-as-dp") -> int:
    result = estimate(model, mesh, rules, batch_size=batch_size, sequence_length=LENGTH, allow_unused=True)
    assert result.uncounted is None
    return result.memory["activations"]


def kept_by(model: nn.Module, arguments: tuple[Tensor, ...]) -> int:
    stored = [*model.parameters(), *model.buffers()]
    with kept_tensors(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in stored) as kept:
        model(*arguments)
    return num_bytes(kept)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_saves(name: str) -> None:
    pytest.importorskip("transformers")
    model, arguments = MODELS[name]()
    for batch_size in (1, 6):
        measured = kept_by(model, arguments(batch_size, LENGTH))
        assert activations(model, batch_size) == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "GPT, attention written out",
        "SwiGLU, MoE in each second block",
        pytest.param("recurrent", marks=pytest.mark.sampled(0)),
    ],
)
def test_a_model_on_the_meta_device_saves_the_same(name: str) -> None:
    model, _ = MODELS[name]()
    expected = activations(model, 4)
    assert activations(model.to("meta"), 4) == expected


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("name", ["recurrent", "convolution and MoE", "in place"])
def test_the_model_is_as_it_was(name: str) -> None:
    model, arguments = MODELS[name]() if name in MODELS else (InPlace(32, 32), hidden_states)
    model.eval()
    inputs, state = arguments(2, LENGTH), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    activations(model, 4)
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model(*inputs).isfinite().all()


# Products


@pytest.mark.parametrize(
    "name", ["GPT, attention written out", "tied embeddings", "checkpointed blocks", "encoder and decoder"]
)
def test_flops_are_what_torch_counts(name: str) -> None:
    """torch's counter leaves out its attention on the CPU: here attention is written out as products."""
    model, arguments = MODELS[name]()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*arguments(4, LENGTH))
    plan = predict(model, ONE_RANK, "ep-as-dp", "cpu", batch_size=4, sequence_length=LENGTH)
    assert plan.flops == 3 * counter.get_total_flops()


# Meshes


class TensorParallel(nn.Module):
    """Two layers of which each rank computes a part, without declarations of their saved tensors."""

    declaration = Declaration(
        logical_names={"up.weight": ("mlp", "embed"), "down.weight": ("embed", "mlp")}, tensor_parallel_dims={"mlp": 64}
    )

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin())  # type: ignore[no-any-return]


def user_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(Attention(is_written_out=True), feed) for feed in (dense(), MoEFeedForward(MOE), TensorParallel())]
    return LanguageModel(*blocks)


LAYOUTS: list[tuple[dict[str, int], str]] = [
    ({"data": 2}, "ep-as-dp"),
    ({"expert": 2}, "ep-as-dp"),
    ({"tensor": 2}, "default"),
]


def kept_on_a_rank() -> list[int]:
    found = []
    for sizes, rules in LAYOUTS:
        model = parallelize(user_model(), Mesh(sizes), rules, dispatch="ring_of_experts", allow_unused=True)
        batch_size = 4 if "tensor" in sizes else 2
        tokens = torch.arange(batch_size * LENGTH).view(batch_size, LENGTH) % 61
        found.append(kept_by(model, (tokens,)))
    return found


def test_a_rank_saves_what_is_planned_for_its_tokens_and_parts() -> None:
    planned = [activations(user_model(), 4, Mesh.planned(sizes), rules) for sizes, rules in LAYOUTS]
    for measured in run_ranks(kept_on_a_rank, 2):
        assert planned == pytest.approx(measured, rel=0.01)


def test_a_search_has_the_numbers_of_an_estimate_and_of_a_prediction() -> None:
    model = user_model().bfloat16()
    sizes: dict[str, Any] = {"batch_size": 16, "sequence_length": LENGTH}
    for plan in search(model, 2, "h100", rules=["ep-as-dp"], num_plans=2, **sizes).plans:
        options: dict[str, Any] = {"dispatch": plan.dispatch, "num_chunks": plan.num_chunks, **sizes}
        expected = estimate(model, Mesh.planned(plan.mesh), plan.rules, allow_unused=True, **options)
        assert plan.memory == sum(expected.memory.values())
        predicted = predict(model, Mesh.planned(plan.mesh), plan.rules, "h100", recompute=plan.recompute, **options)
        assert (predicted.memory, predicted.flops) == (plan.memory, plan.flops)


# Recomputation


class Recomputed(Checkpointed):
    recompute_names = ("user blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(Attention(is_written_out=False), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def test_recomputed_modules_keep_their_input() -> None:
    model = nn.Sequential(nn.Linear(32, 32), *(Recomputed() for _ in range(3)))
    whole = activations(model, 4)
    for module in model[1:]:
        module.recompute = frozenset({"user blocks"})
    memory = estimate(model, ONE_RANK, "ep-as-dp", batch_size=4, sequence_length=LENGTH).memory
    (x,) = hidden_states(4, LENGTH)
    assert memory["activations"] == pytest.approx(kept_by(model, (x,)), rel=1e-3) == 4 * x.nbytes
    assert 3 * memory["recomputed activations"] == whole - memory["activations"]


# Models that cannot be traced


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.moe = nn.Embedding(61, 32), MoEFeedForward(MOE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.moe(x) if tokens.max() > 3 else x  # type: ignore[no-any-return]


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, length: int) -> Tensor:
        return self.linear(x[:, :length])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "reason"),
    [(ReadsValues, "DataDependentOutputException"), (TakesMore, "its forward cannot be traced with")],
)
def test_what_cannot_be_traced_is_named_first(
    make: Callable[[], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    model, sizes = make().bfloat16(), {"batch_size": 4, "sequence_length": LENGTH}
    estimated, found = estimate(model, ONE_RANK, "ep-as-dp", **sizes), search(model, 2, "h100", **sizes)
    predicted = predict(model, ONE_RANK, "ep-as-dp", "h100", **sizes)
    first, *_ = str(estimated).splitlines()
    assert first.startswith(
        f"What {make.__name__} saves and computes beside the modules that declare it is not counted"
    )
    assert reason in first and str(found).splitlines()[2] == first == predicted.uncounted
    model.declaration = Declaration(example_inputs=lambda batch, length: (*hidden_states(batch, length), length))
    if make is TakesMore:
        assert "cannot be traced" not in str(estimate(model, ONE_RANK, "ep-as-dp", **sizes))


def test_example_inputs_of_another_type_are_refused() -> None:
    model = nn.Linear(32, 32)
    model.declaration = Declaration(example_inputs=lambda *sizes: torch.empty(*sizes, 32))
    with pytest.raises(TypeError, match=r"^example_inputs must return a tuple or a dict of arguments, got FakeTensor$"):
        activations(model, 4)


def test_targets_of_example_inputs_count_the_loss() -> None:
    model, _ = MODELS["tied embeddings"]()
    model.declaration = Declaration(example_inputs=lambda *sizes: (*ids(*sizes), *ids(*sizes)))
    tokens, targets = *ids(4, LENGTH), *ids(4, LENGTH)
    assert activations(model, 4) == pytest.approx(kept_by(model, (tokens, targets)), rel=1e-3)
