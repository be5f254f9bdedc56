"""What a model of a user saves and computes, as planned, beside a real forward of it."""

import pytest
import torch
from torch import nn

from maxmoe.planning import estimate
from maxmoe.sharding import Mesh
from support.measured_step import kept_tensors, num_bytes
from support.models_of_users import LENGTH, MODELS


def activations(model: nn.Module, batch_size: int, length: int) -> int:
    result = estimate(model, Mesh.planned({}), "ep-as-dp", batch_size=batch_size, sequence_length=length)
    assert result.uncounted is None
    return result.memory["activations"]


def kept_by(model: nn.Module, arguments: tuple[torch.Tensor, ...]) -> int:
    with kept_tensors([*model.parameters(), *model.buffers()]) as kept:
        model(*arguments)
    return num_bytes(kept)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_saves(name: str) -> None:
    pytest.importorskip("transformers")
    model, arguments = MODELS[name]()
    for batch_size in (1, 6):
        measured = kept_by(model, arguments(batch_size, LENGTH))
        planned = activations(model, batch_size, LENGTH)
        print(name, measured, planned)
        assert planned == pytest.approx(measured, rel=0.03)
