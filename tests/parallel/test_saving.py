"""Checkpoints of one mesh loaded on others, copies of layers, and what cannot be pickled."""

import copy
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from maxmoe import ZeroComputation
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from parallel.steps_on_ranks import made
from support.adapted_decoders import quantized
from support.parallel_decoder import BLOCK, CONFIG, MOE, MeshRules, batch, decoder, loss, token_spec, values
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases, run_ranks

LAYER = replace(
    MOE, expert_bias=False, shared_expert_gate=False, zero_computation=ZeroComputation(constant=2), latent_size=4
)
SMALL = replace(CONFIG, num_layers=1, num_dense_layers=0, moe=LAYER)
WIDE = replace(BLOCK, hidden_size=64, moe=replace(MOE, hidden_size=64, intermediate_size=64))
MESHES: list[tuple[MeshRules, Dispatch]] = [
    (MeshRules("ep-as-dp", {"expert": 2}), "ring_of_experts"),
    (MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), "ragged_all_to_all"),
    (MeshRules("default", {"tensor": 2}), "auto"),
]


def muon_of(model: nn.Module) -> Muon:
    return Muon(parameter_groups(model), lr=0.02, ns_dtype=torch.float64)


def test_training_goes_on_on_another_mesh_with_another_strategy(tmp_path: Path) -> None:
    """Each strategy takes one step from the checkpoint of the previous one; together the steps of one process.

    Muon has matrices with its own state, and others with the state of AdamW.
    """
    whole, num_steps = decoder(SMALL), len(MESHES)
    muon, (tokens, targets) = muon_of(whole), batch()
    for _ in range(num_steps):
        muon.zero_grad()
        loss(whole(tokens), targets).backward()
        muon.step()

    def check(number: int) -> None:
        layout, dispatch = MESHES[number]
        mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        model, spec = parallelize(decoder(SMALL), mesh, rules, dispatch=dispatch), token_spec(mesh, rules)
        optimizer = muon_of(model)
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
                assert_same(model.get_parameter(name).full_tensor(), parameter, name, tolerance=1e-9)  # type: ignore[attr-defined]

    for number, (layout, _) in enumerate(MESHES):
        run_ranks(check, layout.world_size, number)


@pytest.mark.parametrize("make", [made(decoder, SMALL), made(quantized, "int4", WIDE)], ids=["trained", "quantized"])
def test_safetensors_of_several_ranks(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The lines of docs/how_to/checkpoints.md: saved by two ranks under FSDP, loaded with other experts on each."""
    expected = values(make())

    def save() -> None:
        model = parallelize(make(), Mesh({"fsdp": 2}), "pure-fsdp")
        dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))

    def load() -> None:
        model = parallelize(make(), Mesh({"expert": 2}), "ep-as-dp")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()  # type: ignore[attr-defined]
        weights = model.state_dict()
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
        model.load_state_dict(weights)
        for name, parameter in model.named_parameters():
            assert parameter.full_tensor().equal(expected[name]), name  # type: ignore[attr-defined]

    run_ranks(save, 2)
    run_ranks(load, 2)


def test_torch_save_of_a_parallelized_model_says_what_to_use() -> None:
    message = (
        "Mesh(expert=2) has process groups, which cannot be saved, nor can a parallelized module: save its state_dict"
    )

    def check() -> None:
        model = parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp")
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            torch.save(model, io.BytesIO())
        torch.save(model.blocks[1].feed_forward.config, io.BytesIO())

    run_ranks(check, 2)


def test_a_copy_of_a_layer_shares_its_process_groups() -> None:
    def check(dispatch: Dispatch) -> None:
        mesh = Mesh({"expert": 2})
        layer = parallelize(decoder().blocks[1].feed_forward, mesh, "ep-as-dp", dispatch=dispatch)
        x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
        assert copy.deepcopy(layer)(x).hidden_states.equal(layer(x).hidden_states)
        assert copy.deepcopy(mesh) is mesh

    run_cases(check, 2, [(dispatch,) for dispatch in STRATEGIES])
