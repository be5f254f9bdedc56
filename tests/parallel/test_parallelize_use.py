"""How a parallelized module communicates, and what it does with failures, odd batches and other people's modules."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from maxmoe import MoE
from maxmoe.config import LoadBalanceScope
from maxmoe.models.decoder import FeedForward
from maxmoe.sharding import LogicalRules, Mesh, P, parallelize
from support.parallel_decoder import CONFIG, MOE, MeshRules, batch, decoder, loss, step_of_one_process, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_ranks

FSDP_AND_EXPERT = MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2})


def collectives(module: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """How often each was called in forward, and in backward."""
    with CommDebugMode() as forward:
        output = module(x)
    with CommDebugMode() as backward:
        output.sum().backward()
    counts = tuple({str(name): count for name, count in mode.get_comm_counts().items()} for mode in (forward, backward))
    return counts[0], counts[1]


def hidden_states() -> Tensor:
    return torch.randn(2, 8, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("part", ["attention", "feed_forward", "shared_experts"])
def test_tensor_parallel_parts_take_one_sum_and_gather_no_weight(part: str) -> None:
    config = replace(CONFIG, moe=replace(MOE, shared_expert_gate=False))

    def count() -> tuple[dict[str, int], dict[str, int]]:
        model = parallelize(decoder(config), Mesh({"expert": 4}), "ep-tp")
        module = dict(model.named_modules())[
            "blocks.1.feed_forward.shared_experts" if part == "shared_experts" else f"blocks.0.{part}"
        ]
        x = hidden_states()
        return collectives(module, x.detach()[0].requires_grad_() if part == "shared_experts" else x)

    once = {"c10d_functional.all_reduce": 1}
    assert run_ranks(count, 4) == [(once, once)] * 4


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_losses_and_statistics_of_a_layer_take_three_sums_over_each_axis(scope: LoadBalanceScope) -> None:
    """Balance loss, z-loss, statistics: what is added up for one of them travels together."""

    def count() -> tuple[int, list[torch.dtype]]:
        config = replace(MOE, load_balance_scope=scope)
        layer = parallelize(MoE(config).double(), Mesh({"fsdp": 2, "expert": 2}), "ep-as-cp")
        with CommDebugMode() as forward:
            output = layer(torch.randn(2, 4, config.hidden_size, dtype=torch.float64))
        counts = {str(name): count for name, count in forward.get_comm_counts().items()}
        return counts["c10d_functional.all_reduce"], [tensor.dtype for tensor in output.stats]

    assert run_ranks(count, 4) == [(3 * 2, [torch.int64, torch.int64, torch.float64])] * 4


def test_heads_that_cannot_be_told_apart_are_gathered() -> None:
    """4 key-value heads for 8 ranks: two ranks would have half a head each."""

    def count() -> tuple[dict[str, int], dict[str, int]]:
        model = parallelize(decoder(), Mesh({"expert": 8}), "ep-tp")
        return collectives(model.blocks[0].attention, hidden_states())

    for forward, backward in run_ranks(count, 8):
        # In both directions the weights; of its gradient every rank has the whole, and keeps its part.
        assert forward == backward == {"c10d_functional.all_gather_into_tensor": 4}


@pytest.mark.parametrize("layout", [MeshRules("ep-as-cp", {"fsdp": 2, "expert": 2}), FSDP_AND_EXPERT], ids=str)
def test_every_rank_generates_what_one_process_generates(layout: MeshRules) -> None:
    """Also where the ranks train on parts of sequences: here each has them whole, of any length."""
    prompt = torch.arange(3).unsqueeze(0)

    def generate(model: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return model.generate(prompt, 4)

    expected = generate(decoder())
    for generated in run_ranks(lambda: generate(parallelize(decoder(), Mesh(layout.sizes), layout.rules)), 4):
        assert torch.equal(generated, expected)


def test_gradients_accumulate() -> None:
    expected = step_of_one_process(CONFIG).gradients

    def check() -> None:
        mesh = Mesh(FSDP_AND_EXPERT.sizes)
        model = parallelize(decoder(), mesh, FSDP_AND_EXPERT.rules)
        spec = token_spec(mesh, LogicalRules.load(FSDP_AND_EXPERT.rules))
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        for _ in range(2):
            loss(model(tokens), targets).backward()
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), 2 * expected[name], name)

    run_ranks(check, 4)


def test_frozen_parameters_have_no_gradient() -> None:
    expected = step_of_one_process(CONFIG).gradients

    def check() -> None:
        mesh = Mesh(FSDP_AND_EXPERT.sizes)
        model = decoder()
        frozen = [name for name, _ in model.named_parameters() if "router" in name or "embedding" in name]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        parallelize(model, mesh, FSDP_AND_EXPERT.rules)
        spec = token_spec(mesh, LogicalRules.load(FSDP_AND_EXPERT.rules))
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        loss(model(tokens), targets).backward()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name not in frozen)
            if name in frozen:
                assert parameter.grad is None
            else:
                assert_same(parameter.grad.full_tensor(), expected[name], name)

    run_ranks(check, 4)


@pytest.mark.parametrize("sizes", [(5, 3, 0, 0), (0, 1, 7, 0)])
def test_ranks_with_few_sequences_and_with_none(sizes: tuple[int, ...]) -> None:
    expected = step_of_one_process(CONFIG)

    def check() -> None:
        model = parallelize(decoder(), Mesh({"fsdp": 4}), "pure-fsdp")
        tokens, targets = (whole.split(sizes)[dist.get_rank()] for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert_same(output.logits, expected.output.logits.split(sizes)[dist.get_rank()])
        assert_same(output.aux_loss, expected.output.aux_loss)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


def test_a_forward_that_fails_leaves_the_parameters_in_place() -> None:
    expected = step_of_one_process(CONFIG)

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    def check() -> None:
        mesh = Mesh(FSDP_AND_EXPERT.sizes)
        model = parallelize(decoder(), mesh, FSDP_AND_EXPERT.rules)
        before = dict(model.named_parameters())
        spec = token_spec(mesh, LogicalRules.load(FSDP_AND_EXPERT.rules))
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        for path in ("blocks.1.feed_forward.router", "blocks.0.attention", "norm"):
            hook = model.get_submodule(path).register_forward_hook(fail)
            with pytest.raises(KeyError, match="on purpose"):
                model(tokens)
            hook.remove()
            after = dict(model.named_parameters())
            assert after.keys() == before.keys(), path
            assert all(isinstance(parameter, DTensor) for parameter in after.values()), path
        loss(model(tokens), targets).backward()
        for name, parameter in model.named_parameters():
            assert parameter is before[name], name
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


def test_capacity_of_sequences_that_stay_whole() -> None:
    config = replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    expected = step_of_one_process(config)
    assert expected.output.stats[0].dropped > 0

    def check() -> None:
        mesh, rules = Mesh({"fsdp": 2, "expert": 2}), LogicalRules.load("ep-as-dp")
        model, spec = parallelize(decoder(config), mesh, rules), token_spec(mesh, rules)
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert output.stats[0].dropped.equal(expected.output.stats[0].dropped)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


def test_capacity_of_sequences_that_are_cut_is_refused() -> None:
    config = replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    message = "blocks.1.feed_forward needs whole sequences, cut here over ('context',)"
    with fake_rank(0, 4):
        model = decoder(config)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            parallelize(model, Mesh({"fsdp": 2, "context": 2}), "default")
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("rules", ["default", "pure-fsdp", "ep-tp"])
def test_one_rank_computes_what_one_process_does(rules: str) -> None:
    expected, (tokens, targets) = step_of_one_process(CONFIG), batch()
    with fake_rank(0, 1):
        model = parallelize(decoder(), Mesh({"fsdp": 1, "expert": 1}), rules)
        output = model(tokens)
        loss(output, targets).backward()
        assert output.logits.equal(expected.output.logits) and output.aux_loss.equal(expected.output.aux_loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad.to_local().equal(expected.gradients[name]), name


class TwoLayers(nn.Module):
    """A module of somebody else, named from outside; its bias has no names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 4)
        self.logical_names = {"first.weight": ("mlp", "embed"), "second.weight": ("embed", "mlp")}

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


@pytest.mark.parametrize("rules", ["ep-tp", "default", "pure-fsdp"])
@pytest.mark.parametrize("inner", [{}, {"mlp": 8}], ids=["gathered", "tensor parallel"])
def test_modules_of_others(rules: str, inner: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = TwoLayers().double(), torch.randn(8, 4, dtype=torch.float64)
    model.second.bias = None
    model(x, scale=3.0).square().sum().backward()

    def check() -> None:
        mesh, table = Mesh({"fsdp": 2, "tensor": 2, "expert": 2}), LogicalRules.load(rules)
        ours = TwoLayers().double()
        ours.second.bias = None
        ours.load_state_dict(model.state_dict())
        if inner:
            ours.parallel_dims = inner
        parallelize(ours, mesh, table)
        spec = token_spec(mesh, table)
        part = part_by_definition(x, spec, mesh).requires_grad_()
        ours(part, scale=3.0).square().sum().backward()
        for name, parameter in ours.named_parameters():
            assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    run_ranks(check, 8)


@pytest.mark.parametrize(
    "table",
    [
        [("mlp", "expert"), ("activation_mlp", "expert")],
        [("mlp", None), ("activation_mlp", "expert")],
        [("mlp", "fsdp"), ("activation_mlp", None)],
        [("mlp", ("expert", "fsdp")), ("activation_mlp", ("expert",))],
    ],
    ids=["both", "activations only", "weights only, on the axis of the tokens", "weights on more axes"],
)
def test_parts_are_computed_where_weights_and_activations_lie_on_an_axis(table) -> None:
    """Elsewhere weights are gathered: the result is that of one process in any case."""
    torch.manual_seed(0)
    model, x = nn.Sequential(FeedForward(4, 8)).double(), torch.randn(4, 3, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    rules = LogicalRules([("activation_batch", "fsdp"), ("activation_length", None), ("embed", None), *table])

    def check() -> None:
        mesh, ours = Mesh({"fsdp": 2, "expert": 2}), nn.Sequential(FeedForward(4, 8)).double()
        ours.load_state_dict(model.state_dict())
        parallelize(ours, mesh, rules)
        ours(part_by_definition(x, P("fsdp", None, None), mesh)).square().sum().backward()
        for name, parameter in ours.named_parameters():
            assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    run_ranks(check, 4)


def test_parts_of_a_module_must_add_up_to_a_tensor() -> None:
    class Pair(TwoLayers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, x

    with fake_rank(0, 2):
        model = Pair()
        model.parallel_dims = {"mlp": 8}
        model.second.bias = None
        parallelize(model, Mesh({"expert": 2}), "ep-tp")
        with pytest.raises(TypeError, match=r"^Pair has parallel_dims and must return a tensor, got <class 'tuple'>$"):
            model(torch.randn(2, 4))
