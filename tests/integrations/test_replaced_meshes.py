"""Models with replaced blocks on meshes, with padding: losses and all gradients are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from maxmoe import StatsAccumulator, optim, parallelize
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.operator_calls import assert_near
from support.replaced_models import TOLERANCE, replaced
from support.run_ranks import run_ranks
from support.small_models import import_models

PRESETS = ["mixtral", "qwen2_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "llama4", "inkling", "muse_spark"]
import_models(*PRESETS, "longcat_flash")
IDS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6, dtype=torch.int64)
MASK[0, :2], MASK[3, 3:] = 0, 0
TRAINING = {"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"}


def step(module: nn.Module, part: Any = ...) -> Tensor:
    """The sum of the losses of the tokens; one backward."""
    ids, mask = IDS[part], MASK[part]
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
    targets = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def check_gradients(module: nn.Module, whole: nn.Module) -> None:
    for name, parameter in whole.named_parameters():
        gradient = module.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None or not gradient.any(), name
        else:
            whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if parameter.grad.abs().max() > 1e-6:  # rounding, where the exact value is zero
                assert_near(whole_gradient, parameter.grad, TOLERANCE, name)


@pytest.mark.filterwarnings("ignore:the rules shard")
@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.parametrize("preset", PRESETS)
def test_equals_one_process(preset: str) -> None:
    whole = replaced(preset, training=TRAINING)
    counted = StatsAccumulator(whole)
    expected, stats = step(whole), counted.update()

    def check() -> None:
        for sizes, rules, dispatch in (
            ({"expert": 2}, "ep-as-dp", "ring_of_experts"),
            ({"expert": 2}, "ep-as-dp", "ragged_all_to_all"),
            ({"expert": 2}, "ep-as-dp", "least_loaded"),
            ({"expert": 2}, "ep-tp", "auto"),
            ({"tensor": 2}, "default", "auto"),
            ({"fsdp": 2}, "default", "auto"),
        ):
            mesh = Mesh(sizes)
            ours = parallelize(replaced(preset, training=TRAINING), mesh, rules, dispatch=dispatch, allow_unused=True)
            accumulator = StatsAccumulator(ours)
            sharding = token_sharding(mesh, rules)
            loss = step(ours, sharding.slices(IDS.shape))
            if any(sharding.spec):
                dist.all_reduce(loss)
            assert_near(loss, expected, TOLERANCE, "loss")
            check_gradients(ours, whole)
            for path, layer in accumulator.update().layers.items():
                assert torch.equal(layer.tokens_per_expert, stats.layers[path].tokens_per_expert)

    run_ranks(check, 2)


def test_experts_that_cannot_be_sharded_are_replicated() -> None:
    """The stack of LongCat-Flash has unused matrices after the experts."""

    def check() -> None:
        whole = replaced("longcat_flash")
        expected, mesh = step(whole), Mesh({"expert": 2})
        ours = parallelize(replaced("longcat_flash"), mesh, "ep-as-dp")
        loss = step(ours, token_sharding(mesh, "ep-as-dp").slices(IDS.shape))
        dist.all_reduce(loss)
        assert_near(loss, expected, TOLERANCE, "loss")
        check_gradients(ours, whole)

    run_ranks(check, 2)


def test_muon_takes_gate_and_up_as_two_matrices() -> None:
    for preset, layout in (("mixtral", "concatenated"), ("gpt_oss", "interleaved")):
        model = replaced(preset)
        groups = optim.parameter_groups(model)
        assert layout in str(groups), groups
