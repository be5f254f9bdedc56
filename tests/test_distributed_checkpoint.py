"""Checkpoints by torch.distributed.checkpoint: saved under one preset on one mesh, loaded under others, bit by bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from maxmoe.sharding import Assignment, LogicalRules, Mesh, assign, parallelize
from parallel_decoder import CONFIG, LAYOUTS, MOE, MeshRules, decoder, layouts, values
from parts import part_by_definition
from run_ranks import run_ranks

SMALL = replace(CONFIG, num_layers=1, num_dense_layers=0, moe=replace(MOE, expert_bias=False, shared_expert_gate=False))
MOMENTS = ("exp_avg", "exp_avg_sq")


class Training:
    """A parallelized decoder and its AdamW, with the whole values that they should have."""

    def __init__(self, layout: MeshRules) -> None:
        self.mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        whole = decoder(SMALL)
        self.assignments: dict[str, Assignment] = assign(whole, self.mesh, rules)
        self.expected = {"parameter": values(whole)}
        for number, moment in enumerate(MOMENTS, start=1):
            self.expected[moment] = {name: value.square() + number for name, value in values(whole).items()}
        self.model = parallelize(whole, self.mesh, rules)
        self.adamw = torch.optim.AdamW(self.model.parameters(), fused=True)
        get_state_dict(self.model, self.adamw)  # makes the moments

    def parts(self) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        """What this rank has, and what it should have."""
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
        """Give everything the values that it should have."""
        for actual, expected in self.parts().values():
            actual.copy_(expected)

    @torch.no_grad()
    def forget(self) -> None:
        """Give everything another value."""
        for actual, _ in self.parts().values():
            actual.fill_(-1.0)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.adamw)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of every layout, in their order."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = [root / str(layout) for layout in LAYOUTS]

    def save(world_size: int) -> None:
        for layout in layouts(world_size):
            training = Training(layout)
            training.fill()
            dcp.save(training.state(), checkpoint_id=root / str(layout))

    for world_size in (2, 4, 8):
        run_ranks(save, world_size, world_size)
    return folders


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_preset_loads_what_others_saved(world_size: int, checkpoints: list[Path]) -> None:
    """Each from its own checkpoint, and from those of two others: in the end each has been loaded by two others."""

    def check() -> None:
        for layout in layouts(world_size):
            training, number = Training(layout), LAYOUTS.index(layout)
            for offset in (0, 5, 12):
                training.forget()
                folder = checkpoints[(number + offset) % len(checkpoints)]
                training.load(folder)
                for what, (actual, expected) in training.parts().items():
                    assert actual.equal(expected), (folder.name, what)

    run_ranks(check, world_size)
