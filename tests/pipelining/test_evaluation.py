"""What an evaluation leaves behind, and what it cuts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import maxmoe
from maxmoe.models import Decoder, DecoderConfig, DecoderOutput
from maxmoe.pipelining.micro_batches import split
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks


def test_no_parameter_stays_gathered() -> None:
    """A split backward keeps the parameters of a block gathered from its forward on."""
    moe = maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2)
    config = DecoderConfig(vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, moe=moe)

    def loss(output: DecoderOutput, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def check() -> bool:
        mesh, tokens = Mesh({"stage": 1, "fsdp": 2}), torch.zeros(4, 3, dtype=torch.int64)
        run = maxmoe.pipeline(Decoder(config), mesh, "pure-fsdp", loss=loss, schedule="zbv", num_micro_batches=2)
        before = shapes(run.model)
        run.evaluate(tokens, tokens)
        return shapes(run.model) == before

    def shapes(model: nn.Module) -> list[torch.Size]:
        """The shapes of the parts of this rank."""
        return [parameter.to_local().shape for parameter in model.parameters() if isinstance(parameter, DTensor)]

    assert run_ranks(check, 2) == [True, True]


def test_tensors_of_another_length_than_the_inputs_are_passed_whole() -> None:
    inputs, scales = torch.arange(8), torch.ones(3)
    parts = split(inputs, {"labels": inputs + 1}, {"scales": scales, "mask": inputs > 2, "name": "a"}, 3)
    assert [len(part.inputs) for part in parts] == [3, 3, 2]
    for part in parts:
        assert part.targets["labels"].equal(part.inputs + 1) and part.options["mask"].equal(part.inputs > 2)
        assert part.options["scales"].equal(scales) and part.options["name"] == "a"
