"""A sharded module, drawn anew, against one process with the same seed."""

import dataclasses

import pytest
import torch

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize, reset_parameters
from maxmoe.sharding import Mesh
from support import small_decoder
from support.run_ranks import run_ranks


def decoder(device: str) -> Decoder:
    moe = dataclasses.replace(small_decoder.MOE, num_experts=4, hidden_size=8)
    config = small_decoder.make(hidden_size=8, vocab_size=8, moe=moe).config
    return Decoder(config, device=device)


@pytest.mark.parametrize(
    ("rules", "sizes"), [("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), ("ep-tp", {"expert": 2})]
)
def test_the_values_are_those_of_one_process(rules: str, sizes: dict[str, int]) -> None:
    alone = decoder("cpu")
    torch.manual_seed(3)
    alone.reset_parameters()
    next_number = torch.rand(())
    expected = alone.state_dict()

    def draw() -> None:
        model = parallelize(decoder("meta"), Mesh(sizes), rules)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        reset_parameters(model)
        assert torch.rand(()) == next_number
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), name

    run_ranks(draw, Mesh.planned(sizes).num_ranks)
