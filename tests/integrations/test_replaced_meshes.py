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
from support.run_ranks import run_cases, run_ranks
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
    "axk1",
    "cohere2_moe",
    "ernie4_5_moe",
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
# By default two of the meshes for each preset, so that each has experts on several ranks.
CASES = [(first, first) for first in range(3)]
CASES += [pytest.param(first, (first + more) % 3, marks=pytest.mark.slow) for first in range(3) for more in (1, 2)]
# One layer, and two of the family whose layers give the next ones a state.
NUM_LAYERS = {preset: 2 if preset == "zaya" else 1 for preset in PRESETS + REPLICATED}
IDS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6, dtype=torch.int64)
MASK[0, :2], MASK[3, 3:] = 0, 0
TRAINING: dict[str, Any] = {"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"}


def model(preset: str, **training: Any) -> Any:
    return replaced(preset, training, num_hidden_layers=NUM_LAYERS[preset])


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
@pytest.mark.parametrize(("first_preset", "first_mesh"), CASES)
def test_equals_one_process(first_preset: int, first_mesh: int) -> None:
    """A third of the presets on a third of the meshes."""
    presets = PRESETS[first_preset::3]
    wholes = {preset: model(preset, **TRAINING) for preset in presets}
    accumulators = {preset: StatsAccumulator(whole) for preset, whole in wholes.items()}
    losses = {preset: step(whole) for preset, whole in wholes.items()}
    layers = {preset: accumulator.update().layers for preset, accumulator in accumulators.items()}

    def check(preset: str) -> None:
        for sizes, rules, dispatch in MESHES[first_mesh::3]:
            mesh = Mesh(sizes)
            ours = parallelize(model(preset, **TRAINING), mesh, rules, dispatch=dispatch, allow_unused=True)
            accumulator = StatsAccumulator(ours)
            sharding = token_sharding(mesh, rules)
            loss = step(ours, sharding.slices(IDS.shape))
            if any(sharding.spec):
                dist.all_reduce(loss)
            relative = 1e-12 if preset == "dbrx" else TOLERANCE  # all of DBRX is in float64
            assert_near(loss, losses[preset], relative, "loss")
            check_gradients(ours, wholes[preset], relative)
            for path, layer in accumulator.update().layers.items():
                assert torch.equal(layer.tokens_per_expert, layers[preset][path].tokens_per_expert)

    run_cases(check, 2, [(preset,) for preset in presets])


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
def test_experts_without_an_interface_are_lent() -> None:
    """All tokens go to the first experts, which are on one rank."""

    def one_sided(preset: str) -> Any:
        built = model(preset)
        for layer in built.modules():
            if isinstance(layer, TransformersMoE):
                for parameter in layer.router.parameters():
                    parameter.data.zero_()
        return built

    wholes = {preset: one_sided(preset) for preset in ("dbrx", "llama4")}
    losses = {preset: step(whole) for preset, whole in wholes.items()}

    def check(preset: str) -> None:
        mesh = Mesh({"expert": 2})
        ours = parallelize(one_sided(preset), mesh, "ep-as-dp", dispatch="least_loaded", allow_unused=True)
        with moving_experts(expected=True):
            loss = step(ours, token_sharding(mesh, "ep-as-dp").slices(IDS.shape))
        dist.all_reduce(loss)
        assert_near(loss, losses[preset], TOLERANCE, "loss")
        check_gradients(ours, wholes[preset])

    run_cases(check, 2, [(preset,) for preset in wholes])


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # router of Switch
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPSwitchTransformersBlock. returned a view")
def test_experts_that_cannot_be_sharded_are_replicated() -> None:
    """LongCat-Flash's stack has unused matrices after the experts, other families have two modules or no stack."""
    wholes = {preset: model(preset) for preset in REPLICATED}
    losses = {preset: step(whole) for preset, whole in wholes.items()}

    def check(preset: str) -> None:
        for sizes, rules in (({"expert": 2}, "ep-as-dp"), ({"fsdp": 2}, "default")):
            mesh = Mesh(sizes)
            ours = parallelize(model(preset), mesh, rules, allow_unused=True)
            loss = step(ours, token_sharding(mesh, rules).slices(IDS.shape))
            dist.all_reduce(loss)
            assert_near(loss, losses[preset], TOLERANCE, "loss")
            check_gradients(ours, wholes[preset])

    run_cases(check, 2, [(preset,) for preset in REPLICATED])


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    """Also for experts in one matrix whose number of rows is divisible by the ranks."""

    def check() -> None:
        built = small_model("dbrx", ffn_config={"moe_num_experts": 5})
        replace_moe_blocks(built)
        with pytest.raises(ValueError, match=r"num_experts \(5\) must be divisible by the axes \('expert',\)"):
            parallelize(built, Mesh({"expert": 2}), "ep-as-dp", dispatch="ring_of_experts", allow_unused=True)

    run_ranks(check, 2)


def test_muon_takes_gate_and_up_as_two_matrices() -> None:
    for preset, layout in (("mixtral", "concatenated"), ("gpt_oss", "interleaved")):
        groups = optim.parameter_groups(replaced(preset))
        assert layout in str(groups), groups
