"""Models of transformers in pipeline stages: their forward runs on the layers of a rank."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.integrations.transformers import replace_moe_blocks
from maxmoe.parallel import Declaration, PipelineParts
from maxmoe.pipelining import pipeline
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.small_models import import_models, model_of
from support.staged_decoder import check_gradients, part_of_micro_batches

import_models("mixtral", "qwen3_moe", "gpt_oss")
NUM_MICRO_BATCHES = 2
PARTS = PipelineParts(("model.embed_tokens",), "model.layers", ("model.norm", "lm_head"))


def causal_model(preset: str) -> nn.Module:
    """A model with layers of maxmoe in the place of its sparse blocks."""
    torch.manual_seed(0)
    model = model_of(preset, num_hidden_layers=4).double()
    replace_moe_blocks(model)
    model.declaration = Declaration(pipeline_parts=PARTS)
    return model


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:the rules shard")
@pytest.mark.parametrize("preset", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_equals_one_process(preset: str) -> None:
    tokens, targets = torch.randint(0, 32, (2, 4, 6))
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    model, total = causal_model(preset), torch.zeros((), dtype=torch.float64)
    for part in torch.arange(4).tensor_split(NUM_MICRO_BATCHES):
        value = loss(model(tokens[part], attention_mask=mask[part], use_cache=False), targets[part])
        value.backward()
        total += value.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    def check(sizes: dict[str, int], schedule: str) -> None:
        mesh = Mesh(sizes)
        run = pipeline(causal_model(preset), mesh, loss=loss, schedule=schedule, num_micro_batches=NUM_MICRO_BATCHES)
        inputs = [part_of_micro_batches(whole, mesh, "default", NUM_MICRO_BATCHES) for whole in (tokens, targets, mask)]
        found = run.step(*inputs[:2], attention_mask=inputs[2], use_cache=False)
        assert_same(found.loss, total)
        check_gradients(run, gradients)

    run_cases(check, 2, [({"stage": 2}, "1f1b"), ({"stage": 2}, "interleaved_1f1b")])  # gpt-oss numbers its layers
    if preset == "mixtral":
        run_ranks(check, 4, {"stage": 2, "expert": 2}, "gpipe")
