"""maxmoe, PEFT and transformers, imported in any order by scripts."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from support.programs import printed, python

# Runs each script in a fork. PEFT imports `PreTrainedModel`, which takes seconds.
IN_FORKS = """
import os, sys
import torch
from transformers import PreTrainedModel
assert not {"maxmoe", "peft"} & sys.modules.keys()
for script in sys.argv[1:]:
    if os.fork() == 0:
        exec(script)
        sys.exit()
    assert os.wait()[1] == 0, script
"""
CONFIG = "maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=3, top_k=2)"
ADAPTED = f"""
IMPORTS
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
QUANTIZED_EARLIER = """
import maxmoe
model = torch.nn.Sequential(maxmoe.MoE(maxmoe.MoEConfig(hidden_size=64, intermediate_size=64, num_experts=2, top_k=1)))
maxmoe.quantize_experts(model.requires_grad_(False), "mxfp4")
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=["experts.up_proj"]))
trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
assert trained == 2 * 2 * (64 + 64), trained
"""
# The error that docs/troubleshooting.md explains.
NOT_REGISTERED = """
import maxmoe
from transformers import MixtralConfig, MixtralForCausalLM
config = MixtralConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=8)
try:
    MixtralForCausalLM(config).set_experts_implementation("maxmoe")
except ValueError as error:
    assert '`experts_implementation="maxmoe"` is not supported' in str(error), error
else:
    raise AssertionError("supported")
"""


# A PEFT that wraps no parameters: layers run, with a warning.
LEFT_ALONE = f"""
sys.path.insert(0, "another")
import warnings
import maxmoe
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    IMPORTS
assert "another/peft" in peft.__file__
assert ["how this version of PEFT keeps adapters" in str(each.message) for each in caught].count(True) == 1
maxmoe.MoE({CONFIG})(torch.randn(5, 8)).hidden_states.sum().backward()
"""
# transformers looks for PEFT before it imports it.
FOUND_EARLIER = "import maxmoe; from importlib.util import find_spec; find_spec('peft')"
CHECKPOINT, COMPILED = "checkpoint(model, x, use_reentrant=False)", "torch.compile(model, backend='eager')(x)"


def adapted(imports: str, first_call: str) -> str:
    return ADAPTED.replace("IMPORTS", imports).replace("FIRST_CALL", first_call)


SCRIPTS = [
    adapted("import peft; import maxmoe", CHECKPOINT),
    adapted("import maxmoe; import peft", COMPILED),
    adapted(f"{FOUND_EARLIER}; layer = maxmoe.MoE({CONFIG}); import peft", "model(x)"),
    QUANTIZED_EARLIER,
    NOT_REGISTERED,
    LEFT_ALONE.replace("IMPORTS", "import peft; maxmoe.MoE"),
    LEFT_ALONE.replace("IMPORTS", "maxmoe.MoE; import peft"),
]
OTHER_SCRIPTS = [
    adapted("import peft; import maxmoe", COMPILED),
    adapted("import maxmoe; import peft", CHECKPOINT),
]


@pytest.mark.parametrize("scripts", [SCRIPTS, pytest.param(OTHER_SCRIPTS, marks=pytest.mark.sampled(0))])
def test_any_order_of_imports(scripts: list[str], tmp_path: Path) -> None:
    """Experts take adapters, quantized ones too; transformers knows maxmoe after the import of its integration."""
    (tmp_path / "another/peft").mkdir(parents=True)
    (tmp_path / "another/peft/__init__.py").touch()
    printed(python(IN_FORKS, *scripts, cwd=tmp_path))
