"""The connection to PEFT, also with versions of PEFT that store adapters differently."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig, adapters
from maxmoe.adapters import _peft
from maxmoe.adapters import peft as connection
from maxmoe.nn import Experts
from maxmoe.ops import LowRankFactors, RaggedPlan, expert_ffn
from support import programs
from support.moe_layers import make, tokens

EXPERTS = ["moe.experts.gate_proj", "moe.experts.up_proj", "moe.experts.down_proj"]


class Layer(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.moe = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).hidden_states


def adapted() -> PeftModel:
    config = LoraConfig(r=3, target_parameters=EXPERTS, target_modules=[], init_lora_weights=False)
    return get_peft_model(Layer(make()), config)


def test_another_layout_falls_back_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _peft.stacks
    monkeypatch.setattr(_peft, "stacks", lambda *arguments: (original(*arguments)[0].flip(0), original(*arguments)[1]))
    replaced: list[int] = []
    monkeypatch.setattr(_peft, "replace_methods", lambda: replaced.append(1))
    with pytest.warns(UserWarning, match=r"maxmoe does not know how this version of PEFT keeps adapters.*RuntimeError"):
        connection.connect.__wrapped__()
    assert not replaced


def test_the_layout_is_known_whatever_the_default_dtype() -> None:
    """transformers may import PEFT while it makes a model in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        for seed in range(20):
            torch.manual_seed(seed)
            _peft.check_layout()
    finally:
        torch.set_default_dtype(torch.float32)


def test_connecting_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _peft.check_layout()
    assert torch.equal(torch.rand(3), expected)


CONFIG = "maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=3, top_k=2)"
CHECKPOINT, COMPILED = "checkpoint(model, x, use_reentrant=False)", "torch.compile(model, backend='eager')(x)"
PEFT = "import peft"
CALLS = [
    pytest.param("import peft; import maxmoe", CHECKPOINT, marks=pytest.mark.slow),
    pytest.param("import maxmoe; import peft", COMPILED, marks=pytest.mark.slow),
    # transformers looks for PEFT before it imports it.
    (
        f"import maxmoe; from importlib.util import find_spec; find_spec('peft'); layer = maxmoe.MoE({CONFIG}); {PEFT}",
        "model(x)",
    ),
    pytest.param("import peft; import maxmoe", COMPILED, marks=pytest.mark.slow),
    pytest.param("import maxmoe; import peft", CHECKPOINT, marks=pytest.mark.slow),
]
CHECK = f"""
import torch
from torch.utils.checkpoint import checkpoint
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = globals().get("layer") or maxmoe.MoE({CONFIG})
    def forward(self, x):
        return self.moe(x).hidden_states
names = ["moe.experts.up_proj"]
config = peft.LoraConfig(r=2, target_parameters=names, target_modules=[], init_lora_weights=False)
model = peft.get_peft_model(Layer(), config)
x = torch.randn(5, 8)
first = FIRST_CALL
first.sum().backward()
second = model(x)
torch.testing.assert_close(first, second)
from peft.tuners.lora.layer import ParamWrapper
assert hasattr(ParamWrapper.get_delta_weight, "__wrapped__")
assert not torch.equal(model.unload().moe(x).hidden_states, first)
"""


@pytest.mark.parametrize(("imports", "first_call"), CALLS)
def test_any_order_of_imports(imports: str, first_call: str) -> None:
    """The script in a new process."""
    programs.printed(programs.python(imports + CHECK.replace("FIRST_CALL", first_call)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("imports", ["import peft; maxmoe.MoE", "maxmoe.MoE; import peft"])
def test_a_peft_that_wraps_no_parameters_is_left_alone(imports: str, tmp_path: Path) -> None:
    """maxmoe can be imported and layers run, with a warning."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/__init__.py").touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import warnings
import maxmoe
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {imports}
assert peft.__file__.startswith({str(tmp_path)!r})
assert ["how this version of PEFT keeps adapters" in str(each.message) for each in caught].count(True) == 1
import torch
maxmoe.MoE({CONFIG})(torch.randn(5, 8)).hidden_states.sum().backward()
"""
    programs.printed(programs.python(code))


def test_a_forward_that_ignores_the_adapters_is_an_error() -> None:
    class Own(Experts):
        def forward(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
            return expert_ffn(x, weights, plan, self.gate_proj, self.up_proj, self.down_proj)

    layer = make()
    layer.experts.__class__ = Own
    config = LoraConfig(r=3, target_parameters=EXPERTS[:1], target_modules=[], init_lora_weights=False)
    model = get_peft_model(Layer(layer), config)
    with pytest.raises(RuntimeError, match="Own has computed without the adapter beside gate_proj"):
        model(tokens(layer))
    with model.disable_adapter():
        model(tokens(layer))


def test_an_error_leaves_no_factors_behind() -> None:
    model = adapted()
    experts = model.base_model.model.moe.routed_experts
    with pytest.raises(ValueError, match=r"last dim|hidden_size"):
        model(torch.randn(3, 5, dtype=torch.float64))
    config = MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1)
    original, experts.config = experts.config, config
    experts.up_proj.data = experts.up_proj.data[:, :, :1]
    with pytest.raises(ValueError, match="expert_ffn"):
        model(tokens(model.base_model.model.moe))
    experts.config = original
    assert all(adapters.factors_of(experts, name.split(".")[-1]) is None for name in EXPERTS)


def test_a_module_that_an_adapted_one_calls_has_no_factors() -> None:
    outer, inner = nn.Module(), nn.Module()
    factors = LowRankFactors(torch.ones(3, 4, 1), torch.ones(3, 1, 8))
    with adapters.hand_over(outer, "up_proj", factors):
        assert adapters.factors_of(inner, "up_proj") is None
        assert adapters.factors_of(outer, "up_proj") is factors


def test_the_active_copy_of_a_saved_router_is_balanced() -> None:
    layer = make(score_function="sigmoid", score_correction_bias=True, correction_bias_update_rate=0.25)
    config = LoraConfig(r=3, target_parameters=EXPERTS, target_modules=[], modules_to_save=["router"])
    model = get_peft_model(Layer(layer), config)
    before = {name: value.clone() for name, value in model.state_dict().items() if "correction_bias" in name}
    layer.update_correction_bias(layer(tokens(layer)).stats.tokens_per_expert)
    changed = {name for name, value in model.state_dict().items() if name in before and not value.equal(before[name])}
    assert changed and all("modules_to_save.default" in name for name in changed)
