"""Forwards that number blocks, compute outside of stages, share modules or modify hidden states in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator, ZeroComputation, parallelize, record_routing
from maxmoe.costs import estimate
from maxmoe.families.zaya import RouterMLP
from maxmoe.models import Decoder
from maxmoe.parallel import Declaration, PipelineParts
from maxmoe.pipelining import Pipeline, pipeline
from maxmoe.pipelining.stage_modules import stage_module, stage_parts
from maxmoe.sharding import Mesh
from support.run_ranks import run_cases, run_ranks
from support.sampling import by_default
from support.staged_decoder import batch, check_gradients, config, decoder, staged

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PARTS = PipelineParts(("first",), "blocks", ("last",))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


class Model(nn.Module):
    """Four blocks; the forward calls `step` for each block."""

    def __init__(self, step: Callable[..., Tensor] | None = None, parts: PipelineParts = PARTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.declaration = Declaration(pipeline_parts=parts)
        self._step = step
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if self._step is None else self._step(self, index, block, x)
        return self.last(x)


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += self.weight[0]
        return x


class Powered(nn.Linear):
    def forward(self, x: Tensor, power: int) -> Tensor:
        return super().forward(x) * 2.0**power


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Sum(nn.Module):
    """The sum of two parameters gives both the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.one + self.other)


class Stateful(nn.Module):
    """Hidden states of width 4 and, beside them, the state of the router, which a stage passes on with them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 4,
            "intermediate_size": 3,
            "num_experts": 3,
            "zero_computation": ZeroComputation(zero=1),
            "top_k": 1,
        }
        config = MoEConfig(**sizes, normalization="none", router=RouterMLP(hidden_size=2, takes_state=True))
        self.layer = MoEFeedForward(config)

    def forward(self, stream: Tensor) -> Tensor:
        x, state = stream.split((4, 2), -1)
        out, state = self.layer(x, None, state)
        return torch.cat((x + out, state), -1)


def with_blocks(make: Callable[[], nn.Module], step: Any = None, parts: PipelineParts = PARTS) -> Model:
    model = Model(step, parts)
    model.blocks = nn.ModuleList(make() for _ in range(4)).double()
    return model


def with_shared_norm() -> Model:
    model = Model()
    norm = nn.LayerNorm(6)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), norm if i > 1 else nn.Identity()) for i in range(4))
    return model.double()


def with_repeated_activation() -> Model:
    model, activation = Model(), nn.SiLU()
    model.blocks = nn.ModuleList([nn.Linear(6, 6), activation, nn.Linear(6, 6), activation]).double()
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "numbers its blocks": lambda: with_blocks(lambda: Powered(6, 6), lambda _model, index, block, x: block(x, index)),
    "indexes its blocks": lambda: Model(lambda model, index, _block, x: model.blocks[index](x)),
    "adds what blocks return": lambda: Model(
        lambda _model, _index, block, x: x + block(x).relu(),
        PipelineParts(("first",), "blocks", ("last",), removes_blocks=True),
    ),
    "modifies in place": lambda: with_blocks(lambda: InPlace(6, 6)),
    "blocks return pairs": lambda: with_blocks(
        lambda: Pair(6, 6),
        lambda _model, _index, block, x: block(x)[0],
        PipelineParts(("first",), "blocks", ("last",), absent_block_output=lambda x: (x, None)),
    ),
    "sums of parameters": lambda: with_blocks(Sum),
    "a state of the router": lambda: with_blocks(Stateful),
    "a norm of two blocks": with_shared_norm,
    "an activation that is several blocks": with_repeated_activation,
}


@pytest.mark.parametrize("of_two_stages", by_default(["zbv", "interleaved_1f1b"], ["zbv"]))
def test_equals_one_process(of_two_stages: str) -> None:
    """With one stage on each rank, and with two, for which the schedule is given."""

    def check(name: str) -> None:
        whole = wholes[name]
        # The last two blocks, which are on one stage with these schedules, share the norm.
        schedules = {"1f1b": [1, 3], of_two_stages: None}
        if name == "a norm of two blocks":
            schedules = {"1f1b": [1, 3], "gpipe": [2, 2]}
        for schedule, blocks in schedules.items():
            model = MODELS[name]()
            model.load_state_dict(whole.state_dict())
            options: Any = {"loss": loss, "schedule": schedule, "num_micro_batches": 2, "blocks_per_stage": blocks}
            run = pipeline(model, Mesh({"stage": 2}), **options)
            run.step(X, X)
            check_gradients(run, {key: value.grad for key, value in whole.named_parameters() if value.grad is not None})

    wholes = {}
    for name, make in MODELS.items():
        torch.manual_seed(1)
        wholes[name] = make()
        for part in X.tensor_split(2):
            loss(wholes[name](part), part).backward()
    run_cases(check, 2, [(name,) for name in MODELS])


def test_a_parameter_of_two_blocks_with_a_split_backward() -> None:
    """torch would run the backward of the shared norm twice."""
    model = with_shared_norm()
    for part in X.tensor_split(4):
        loss(model(part), part).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}

    def check() -> None:
        options: Any = {"loss": loss, "num_micro_batches": 4, "stages_per_rank": 2, "blocks_per_stage": [2, 2]}
        run = pipeline(with_shared_norm(), Mesh({"stage": 1}), schedule="interleaved_zero_bubble", **options)
        run.step(X, X)
        check_gradients(run, gradients)

    run_ranks(check, 1)


def test_gradients_of_a_sum_with_parallelize() -> None:
    x, expected = X, Sum().double()
    for _ in range(2):
        expected(x).sum().backward()

    def check() -> None:
        model = parallelize(Sum().double(), Mesh({"expert": 1}))
        for _ in range(2):
            model(x).sum().backward()
        for name, parameter in expected.named_parameters():
            assert model.get_parameter(name).grad.to_local().allclose(parameter.grad, rtol=1e-14), name

    run_ranks(check, 1)


class Scaled(Model):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(2 * x)


def test_a_stage_can_be_estimated() -> None:
    model, step = Decoder(config("mixtral"), device="meta"), {"batch_size": 8, "sequence_length": 6}
    whole, *stages = (
        estimate(each, Mesh.planned({}), "default", **step)
        for each in (model, *(stage_module(model, part) for part in stage_parts(model, 2, None)))
    )
    for purpose in ("parameters", "gradients", "state of adamw"):
        assert whole.memory[purpose] == sum(stage.memory[purpose] for stage in stages)
    assert whole.flops == sum(stage.flops for stage in stages)
    assert all(0 < stage.memory["activations"] < whole.memory["activations"] for stage in stages)


def test_what_every_stage_would_do_is_refused() -> None:
    expected = "must not compute with the hidden states outside of its pipeline_parts"

    def check() -> None:
        for model in (Scaled(), Model(lambda _model, _index, block, x: x + block(x))):
            run = pipeline(model, Mesh({"stage": 2}), loss=loss, schedule="gpipe", num_micro_batches=2)
            with pytest.raises(ValueError, match=expected):
                run.step(X, X)

    run_ranks(check, 2)


def test_a_step_that_fails_keeps_earlier_gradients() -> None:
    def check() -> None:
        run = pipeline(Model(), Mesh({"stage": 1}), loss=loss, schedule="gpipe", num_micro_batches=2)
        run.step(X, X)
        before = {name: parameter.grad.to_local().clone() for name, parameter in run.named_parameters()}
        handle = run.model.blocks[3].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            run.step(X[:2], X[:2])
        handle.remove()
        for name, parameter in run.named_parameters():
            assert parameter.grad.to_local().equal(before[name])

    run_ranks(check, 1)


def fail(*_: Any) -> None:
    raise ArithmeticError


def test_statistics_and_records_of_ranks_without_layers() -> None:
    """The first stage of this model has a dense block only."""
    dense = config("mixtral")

    def make(model: nn.Module | None = None) -> Pipeline:
        options: Any = {"num_micro_batches": 4, "blocks_per_stage": [1, 3]}
        return staged(dense, Mesh({"stage": 2}), "default", "1f1b", model=model, **options)

    def check() -> None:
        run = make()
        with record_routing(run.model) as record:
            run.step(*batch())
        assert len(record) == (4 if torch.distributed.get_rank() else 0)
        model = decoder(dense)
        StatsAccumulator(model)
        with pytest.raises(ValueError, match="model must have no StatsAccumulator yet"):
            make(model)

    assert isinstance(dense.moe, MoEConfig)
    run_ranks(check, 2)
