"""Errors for layers that cannot be pickled name the alternative, and copies of a parallelized layer run."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist

from maxmoe.parallel import parallelize
from maxmoe.sharding import Mesh
from support.parallel_decoder import decoder
from support.run_ranks import run_ranks


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


def test_a_planned_mesh_can_be_saved() -> None:
    file = io.BytesIO()
    torch.save(Mesh.planned({"expert": 2}), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).sizes == {"expert": 2}


def test_a_copy_of_a_layer_shares_its_process_groups() -> None:
    def check() -> None:
        mesh = Mesh({"expert": 2})
        layer = parallelize(decoder().blocks[1].feed_forward, mesh, "ep-as-dp")
        x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
        assert copy.deepcopy(layer)(x).hidden_states.equal(layer(x).hidden_states)
        assert copy.deepcopy(mesh) is mesh

    run_ranks(check, 2)
