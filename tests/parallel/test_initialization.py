"""A sharded module, drawn anew, against one process with the same seed."""

import torch

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize, reset_parameters
from maxmoe.sharding import Mesh
from support.parallel_decoder import CONFIG
from support.run_ranks import run_cases


def test_the_values_are_those_of_one_process() -> None:
    alone = Decoder(CONFIG)
    torch.manual_seed(3)
    alone.reset_parameters()
    next_number, expected = torch.rand(()), alone.state_dict()

    def draw(rules: str, sizes: dict[str, int]) -> None:
        model = parallelize(Decoder(CONFIG, device="meta"), Mesh(sizes), rules)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        reset_parameters(model)
        assert torch.rand(()) == next_number
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), name  # type: ignore[attr-defined]

    run_cases(draw, 4, [("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), ("ep-tp", {"data": 2, "expert": 2})])
