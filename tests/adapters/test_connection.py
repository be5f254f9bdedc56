"""The connection to PEFT: any order of imports, other versions of PEFT, errors, and the memory of a step."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from maxmoe import MoE, MoEConfig, adapters
from maxmoe.adapters import _peft
from maxmoe.adapters import peft as connection
from maxmoe.nn import Experts
from maxmoe.ops import LowRankFactors, RaggedPlan, expert_ffn
from support import programs
from support.adapted import EXPERTS, Model, adapted, adapted_layer, trained
from support.memory import MARGIN, SELF_CONTAINED, at_most
from support.moe_layers import make, tokens

# Versions of PEFT


def test_another_layout_falls_back_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _peft.stacks
    monkeypatch.setattr(_peft, "stacks", lambda *arguments: (original(*arguments)[0].flip(0), original(*arguments)[1]))
    replaced: list[int] = []
    monkeypatch.setattr(_peft, "replace_methods", lambda: replaced.append(1))
    with pytest.warns(UserWarning, match=r"maxmoe does not know how this version of PEFT keeps adapters.*RuntimeError"):
        connection.connect.__wrapped__()
    assert not replaced


def test_the_layout_is_known_whatever_the_default_dtype() -> None:
    """transformers may import PEFT while it makes a model in bfloat16. The check draws no random numbers."""
    torch.set_default_dtype(torch.bfloat16)  # until the end of the test
    for seed in range(20):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        _peft.check_layout()
        assert torch.equal(torch.rand(3), expected)


CONFIG = "maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=3, top_k=2)"
# transformers looks for PEFT before it imports it.
AFTER_A_LAYER = (
    f"import maxmoe; from importlib.util import find_spec; find_spec('peft'); layer = maxmoe.MoE({CONFIG}); import peft"
)
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


@pytest.mark.parametrize(
    ("imports", "first_call"),
    [
        (AFTER_A_LAYER, "model(x)"),
        pytest.param("import peft; import maxmoe", "checkpoint(model, x, use_reentrant=False)", marks=pytest.mark.slow),
        pytest.param("import maxmoe; import peft", "torch.compile(model, backend='eager')(x)", marks=pytest.mark.slow),
    ],
    ids=["peft last", "peft first", "compiled"],
)
def test_any_order_of_imports(imports: str, first_call: str) -> None:
    """The script in a new process."""
    programs.printed(programs.python(imports + CHECK.replace("FIRST_CALL", first_call)))


# Errors


def test_a_forward_that_ignores_the_adapters_is_an_error() -> None:
    class Own(Experts):
        def forward(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
            return expert_ffn(x, weights, plan, self.gate_proj, self.up_proj, self.down_proj)

    layer = make()
    layer.experts.__class__ = Own
    model = adapted(layer, ["experts.gate_proj"])
    with pytest.raises(RuntimeError, match="Own has computed without the adapter beside gate_proj"):
        model(tokens(layer))
    with model.disable_adapter():
        model(tokens(layer))


def test_an_error_leaves_no_factors_behind() -> None:
    layer = make()
    model, x, experts = adapted_layer(layer), tokens(layer), layer.routed_experts
    with pytest.raises(ValueError, match=r"last dim|hidden_size"):
        model(torch.randn(3, 5, dtype=torch.float64))
    original, experts.config = experts.config, MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1)
    experts.up_proj.data = experts.up_proj.data[:, :, :1]
    with pytest.raises(ValueError, match="expert_ffn"):
        model(x)
    experts.config = original
    assert all(adapters.factors_of(experts, name) is None for name in EXPERTS)


def test_a_module_that_an_adapted_one_calls_has_no_factors() -> None:
    outer, inner = nn.Module(), nn.Module()
    factors = LowRankFactors(torch.ones(3, 4, 1), torch.ones(3, 1, 8))
    with adapters.hand_over(outer, "up_proj", factors):
        assert adapters.factors_of(inner, "up_proj") is None
        assert adapters.factors_of(outer, "up_proj") is factors


# Memory

T, D, F, E, K = 16, 512, 256, 64, 2


def of_transformers(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Experts, and a routing."""
    config = getattr(transformers, f"{kind}Config")(hidden_size=D, intermediate_size=F, num_local_experts=E)
    config._experts_implementation = "maxmoe"
    experts = {"Mixtral": MixtralExperts, "GptOss": GptOssExperts}[kind](config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts, (torch.arange(T * K).view(T, K) % E, torch.ones(T, K))


def of_maxmoe() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return MoE(MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K)), ()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
@pytest.mark.parametrize(
    "make_experts",
    [partial(of_transformers, "Mixtral"), partial(of_transformers, "GptOss"), of_maxmoe],
    ids=["mixtral", "gpt_oss", "maxmoe"],
)
def test_a_step_takes_less_memory_than_one_stack_of_matrices(
    make_experts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT alone, without the connection, adds the product of the factors to the weights."""
    experts, routing = make_experts()
    model: nn.Module = Model(experts)
    stacks = {name: parameter.nbytes for name, parameter in model.named_parameters() if parameter.dim() == 3}
    smallest = min(stacks.values())
    assert smallest >= SELF_CONTAINED and len(stacks) >= 2
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=[*stacks], target_modules=[]))
    x = torch.randn(T, D, requires_grad=True)

    def step() -> None:
        x.grad = None
        model.zero_grad()
        model(x, *routing).square().sum().backward()

    step()  # gradients of x and of the adapters stay
    with at_most(smallest - MARGIN):
        step()
    assert x.grad is not None and x.grad.any()
    assert all(parameter.grad is not None for parameter in trained(model).values())
    monkeypatch.setattr(_peft, "takes", lambda module, parameter: False)
    with pytest.raises(RuntimeError, match="allocate memory"), at_most(smallest - MARGIN):
        step()
