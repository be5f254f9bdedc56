"""Models with replaced blocks on meshes, with padding: losses and all gradients equal one process's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from maxmoe import StatsAccumulator, optim, parallelize
from maxmoe.integrations.transformers import TransformersMoE, replace_moe_blocks
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.moved_experts import moving_experts
from support.operator_calls import assert_near
from support.replaced_models import TOLERANCE, replaced, small_model
from support.run_ranks import run_ranks
from support.small_models import import_models

PRESETS = [
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "nemotron_h",
    "gpt_oss",
    "llama4",
    "dbrx",
    "inkling",
    "muse_spark",
    "step3p7",
    "zaya",
]
REPLICATED = ["longcat_flash", "jetmoe", "switch_transformers"]
import_models(*PRESETS, *REPLICATED)
MESHES: list[tuple[dict[str, int], str, Any]] = [
    ({"expert": 2}, "ep-as-dp", "ring_of_experts"),
    ({"expert": 2}, "ep-as-dp", "ragged_all_to_all"),
    ({"expert": 2}, "ep-as-dp", "least_loaded"),
    ({"expert": 2}, "ep-tp", "auto"),
    ({"tensor": 2}, "default", "auto"),
    ({"fsdp": 2}, "default", "auto"),
]
# Two of the meshes for each preset, so that each has experts on several ranks.
THIRDS = [slice(number, None, 3) for number in range(3)]
CASES = [(preset, THIRDS[number % 3]) for number, preset in enumerate(PRESETS)]
CASES += [
    pytest.param(preset, THIRDS[(number + more) % 3], marks=pytest.mark.sampled(0))
    for number, preset in enumerate(PRESETS)
    for more in (1, 2)
]
IDS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6, dtype=torch.int64)
MASK[0, :2], MASK[3, 3:] = 0, 0
TRAINING = {"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"}


def step(module: nn.Module, part: Any = ...) -> Tensor:
    """The sum of the losses of the tokens; one backward."""
    ids, mask = IDS[part], MASK[part]
    more = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    targets = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def check_gradients(module: nn.Module, whole: nn.Module, relative: float = TOLERANCE) -> None:
    for name, parameter in whole.named_parameters():
        gradient = module.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None or not gradient.any(), name
        else:
            whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if parameter.grad.abs().max() > 1e-6:  # rounding, where the exact value is zero
                assert_near(whole_gradient, parameter.grad, relative, name)


@pytest.mark.filterwarnings("ignore:the rules shard")
@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.parametrize(("preset", "meshes"), CASES)
def test_equals_one_process(preset: str, meshes: slice) -> None:
    whole = replaced(preset, training=TRAINING)
    counted = StatsAccumulator(whole)
    expected, stats = step(whole), counted.update()

    def check() -> None:
        for sizes, rules, dispatch in MESHES[meshes]:
            mesh = Mesh(sizes)
            ours = parallelize(replaced(preset, training=TRAINING), mesh, rules, dispatch=dispatch, allow_unused=True)
            accumulator = StatsAccumulator(ours)
            sharding = token_sharding(mesh, rules)
            loss = step(ours, sharding.slices(IDS.shape))
            if any(sharding.spec):
                dist.all_reduce(loss)
            relative = 1e-12 if preset == "dbrx" else TOLERANCE  # all of DBRX is in float64
            assert_near(loss, expected, relative, "loss")
            check_gradients(ours, whole, relative)
            for path, layer in accumulator.update().layers.items():
                assert torch.equal(layer.tokens_per_expert, stats.layers[path].tokens_per_expert)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.parametrize("preset", ["dbrx", "llama4"])
def test_experts_without_an_interface_are_lent(preset: str) -> None:
    """All tokens go to the first experts, which are on one rank."""

    def one_sided() -> Any:
        model = replaced(preset)
        for layer in model.modules():
            if isinstance(layer, TransformersMoE):
                for parameter in layer.router.parameters():
                    parameter.data.zero_()
        return model

    whole = one_sided()
    expected = step(whole)

    def check() -> None:
        mesh = Mesh({"expert": 2})
        ours = parallelize(one_sided(), mesh, "ep-as-dp", dispatch="least_loaded", allow_unused=True)
        with moving_experts(expected=True):
            loss = step(ours, token_sharding(mesh, "ep-as-dp").slices(IDS.shape))
        dist.all_reduce(loss)
        assert_near(loss, expected, TOLERANCE, "loss")
        check_gradients(ours, whole)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # router of Switch
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPSwitchTransformersBlock. returned a view")
@pytest.mark.parametrize("preset", REPLICATED)
def test_experts_that_cannot_be_sharded_are_replicated(preset: str) -> None:
    """LongCat-Flash's stack has unused matrices after the experts, other families have two modules or no stack."""
    whole = replaced(preset)
    expected = step(whole)

    def check() -> None:
        for sizes, rules in (({"expert": 2}, "ep-as-dp"), ({"fsdp": 2}, "default")):
            mesh = Mesh(sizes)
            ours = parallelize(replaced(preset), mesh, rules, allow_unused=True)
            loss = step(ours, token_sharding(mesh, rules).slices(IDS.shape))
            dist.all_reduce(loss)
            assert_near(loss, expected, TOLERANCE, "loss")
            check_gradients(ours, whole)

    run_ranks(check, 2)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    """Also for experts in one matrix whose number of rows is divisible by the ranks."""

    def check() -> None:
        model = small_model("dbrx", ffn_config={"moe_num_experts": 5})
        replace_moe_blocks(model)
        with pytest.raises(ValueError, match=r"num_experts \(5\) must be divisible by the axes \('expert',\)"):
            parallelize(model, Mesh({"expert": 2}), "ep-as-dp", dispatch="ring_of_experts", allow_unused=True)

    run_ranks(check, 2)


def test_muon_takes_gate_and_up_as_two_matrices() -> None:
    for preset, layout in (("mixtral", "concatenated"), ("gpt_oss", "interleaved")):
        model = replaced(preset)
        groups = optim.parameter_groups(model)
        assert layout in str(groups), groups
