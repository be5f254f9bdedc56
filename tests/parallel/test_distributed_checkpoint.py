"""Checkpoints by torch.distributed.checkpoint: saved under one preset on one mesh, loaded under others, bit by bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from maxmoe import ZeroComputation
from maxmoe.parallel import ParameterSharding, parallelize, parameter_shardings
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import CONFIG, MOE, MeshRules, batch, decoder, layouts, loss, token_spec, values
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks
from support.sampling import by_default

LAYER = replace(
    MOE, expert_bias=False, shared_expert_gate=False, zero_computation=ZeroComputation(constant=2), latent_size=4
)
SMALL = replace(CONFIG, num_layers=1, num_dense_layers=0, moe=LAYER)
MOMENTS = ("exp_avg", "exp_avg_sq")


def empty_like(parameter: Tensor) -> DTensor:
    """A DTensor sharded as the parameter is, without an operator of DTensor: its first call on a mesh is slow."""
    assert isinstance(parameter, DTensor)
    shard, shape, stride = torch.empty_like(parameter.to_local()), parameter.shape, parameter.stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


class Training:
    """A parallelized decoder and its AdamW, with the whole values that they should have."""

    def __init__(self, layout: MeshRules) -> None:
        self.mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        whole = decoder(SMALL)
        self.assignments: dict[str, ParameterSharding] = parameter_shardings(whole, self.mesh, rules)
        self.expected = {"parameter": values(whole)}
        for number, moment in enumerate(MOMENTS, start=1):
            self.expected[moment] = {name: value.square() + number for name, value in values(whole).items()}
        self.model = parallelize(whole, self.mesh, rules)
        self.adamw = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            moments = {moment: empty_like(parameter) for moment in MOMENTS}
            self.adamw.state[parameter] = {"step": torch.tensor(1.0), **moments}
        model_state, optimizer_state = get_state_dict(self.model, self.adamw)
        self.state = {"model": model_state, "optimizer": optimizer_state}

    def parts(self) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        """Return this rank's values and the expected values, by kind and name."""
        found = {}
        for kind, whole in self.expected.items():
            for name, parameter in self.model.named_parameters():
                actual = parameter if kind == "parameter" else self.adamw.state[parameter][kind]
                assert isinstance(actual, DTensor)
                spec = self.assignments[name].sharding.spec
                found[kind, name] = actual.to_local(), part_by_definition(whole[name], spec, self.mesh)
        return found

    @torch.no_grad()
    def fill(self) -> None:
        """Set all values to the expected ones."""
        for actual, expected in self.parts().values():
            actual.copy_(expected)

    @torch.no_grad()
    def forget(self) -> None:
        """Set all values to others."""
        for actual, _ in self.parts().values():
            actual.fill_(-1.0)

    def load(self, folder: Path) -> None:
        """Load into the tensors of the state dict, which belong to the model and to AdamW."""
        dcp.load(self.state, checkpoint_id=folder)


@pytest.mark.slow
def test_presets_load_what_others_saved(tmp_path: Path) -> None:
    """Every second layout loads a checkpoint of another number of ranks, the others the previous layout's."""
    saved: list[MeshRules] = []

    def check(world_size: int) -> None:
        before = saved[-1] if saved else None
        for number, layout in enumerate(layouts(world_size)):
            training = Training(layout)
            training.fill()
            dcp.save(training.state, checkpoint_id=tmp_path / str(layout))
            training.forget()
            source = saved[number % len(saved)] if saved and number % 2 else before or layout
            training.load(tmp_path / str(source))
            for what, (actual, expected) in training.parts().items():
                assert actual.equal(expected), (str(source), str(layout), what)
            before = layout

    for world_size in (2, 8, 4):
        run_ranks(check, world_size, world_size)
        saved = layouts(world_size)


STRATEGIES: list[tuple[MeshRules, Dispatch]] = [
    (MeshRules("ep-as-dp", {"expert": 2}), "ring_of_experts"),
    (MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), "ragged_all_to_all"),
    (MeshRules("ep-as-cp", {"expert": 2}), "ragged_all_to_all"),
]


@pytest.mark.parametrize("num_steps", by_default([2, 3], [2]))
def test_training_goes_on_on_another_mesh_with_another_strategy(num_steps: int, tmp_path: Path) -> None:
    """Each strategy takes one step from the checkpoint of the previous one; together the steps of one process."""
    whole = decoder(SMALL)
    adamw, (tokens, targets) = torch.optim.AdamW(whole.parameters(), lr=0.01), batch()
    for _ in range(num_steps):
        adamw.zero_grad()
        loss(whole(tokens), targets).backward()
        adamw.step()

    def check(number: int) -> None:
        layout, dispatch = STRATEGIES[number]
        mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        model, spec = parallelize(decoder(SMALL), mesh, rules, dispatch=dispatch), token_spec(mesh, rules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if number:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=tmp_path / str(number - 1))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        part, part_targets = (part_by_definition(tensor, spec, mesh) for tensor in (tokens, targets))
        loss(model(part), part_targets).backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / str(number))
        if number == num_steps - 1:
            for name, parameter in whole.named_parameters():
                assert_same(model.get_parameter(name).full_tensor(), parameter, name, tolerance=1e-10)

    for number, (layout, _) in enumerate(STRATEGIES[:num_steps]):
        run_ranks(check, layout.world_size, number)


def test_safetensors_of_several_ranks(tmp_path: Path) -> None:
    """The lines of docs/how_to/checkpoints.md: saved by two ranks under FSDP, loaded with other experts on each."""
    expected = values(decoder(SMALL))

    def save() -> None:
        model = parallelize(decoder(SMALL), Mesh({"fsdp": 2}), "pure-fsdp")
        dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))

    def load() -> None:
        model = parallelize(decoder(SMALL), Mesh({"expert": 2}), "ep-as-dp")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(-1.0)
        weights = model.state_dict()
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
        model.load_state_dict(weights)
        for name, parameter in model.named_parameters():
            assert parameter.full_tensor().equal(expected[name]), name

    run_ranks(save, 2)
    run_ranks(load, 2)
