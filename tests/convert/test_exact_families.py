"""Layers in float64 against the code of their families in float64, with padding, in one process and on ranks."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

from maxmoe import MoE, parallelize
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.named import named
from support.operator_calls import assert_near
from support.run_ranks import run_ranks
from support.small_models import MODELS, REPLACED_ONLY, block_of, import_models

# Families whose routers or experts differ from DeepSeek-V3's, with 8 experts, which are divisible by 4 ranks.
ON_RANKS: dict[str, dict[str, Any]] = {
    "kolibri1": {"num_experts": 8, "norm_topk_prob": True},
    "axk1": {},
    "axk2": {},
    "cohere2_moe": {"expert_selection_fn": "sigmoid"},
    "mistral_large4": {},
    "beam": {},
    "gemma4": {},
    "inkling": {},
    "muse_spark": {},
    "step3p7": {},
    "deepseek_v4": {"layer": 1},  # which takes ids of the tokens
    "zaya": {"layer": 1},  # which takes a state
}
import_models(*ON_RANKS)
STRATEGIES = [
    ("ep-as-dp", "ring_of_experts"),
    ("ep-as-dp", "ragged_all_to_all"),
    ("ep-as-dp", "least_loaded"),
    ("ep-tp", "auto"),
]
OTHER_CASES = [(2, 1), (4, 0), (4, 1)]


class InFloat64(TorchFunctionMode):
    """Turns float32, in which families compute routers and norms, into float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """Tokens ``(4, 7, D)`` with a mask, and a block's results; gradients by the names of our parameters.

    With a state of the router, one from the layer before, and the state for the next layer; with ids of the tokens.
    """

    block: nn.Module
    inputs: dict[str, Tensor]
    mask: Tensor
    ids: Tensor | None
    cotangents: list[Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, preset: str, **sizes: Any) -> "Step":
        torch.manual_seed(0)
        block: Any = block_of(preset, **sizes).double()
        if preset == "axk2":  # then both experts of the group that is left out are selected, with a score of zero
            block.gate.e_score_correction_bias -= 2
        mask = torch.ones(4, 7).bool()
        mask[0, :3], mask[2, 5:], mask[3] = False, False, False
        sizes = {"x": 16, "router_state": 6} if preset == "zaya" and block.gate.use_eda else {"x": 16}
        inputs = {
            name: torch.randn(4, 7, size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()
        }
        carrier, ids = copy.deepcopy(block), torch.randint(32, (4, 7)) if preset == "deepseek_v4" else None
        with InFloat64():
            output = carrier(*inputs.values(), **({} if ids is None else {"input_ids": ids}))
            outputs = [*output] if preset == "zaya" else [output[0] if isinstance(output, tuple) else output]
            outputs[0] = outputs[0].reshape(4, 7, 16)
            cotangents = [torch.randn_like(each) * mask.unsqueeze(2) for each in outputs]
            torch.autograd.backward(outputs, cotangents)
        for parameter in carrier.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = dict(MoE.from_transformers(carrier).named_parameters())
        gradients |= {name: leaf.grad for name, leaf in inputs.items()}
        named = zip(("hidden_states", "router_state"), outputs, strict=False)
        outputs = {name: each.detach() * mask.unsqueeze(2) for name, each in named}
        inputs = {name: leaf.detach() for name, leaf in inputs.items()}
        ids = ids if getattr(block, "is_hash", False) else None
        return cls(block, inputs, mask, ids, cotangents, outputs, gradients)

    def check(self, layer: MoE, part: Any = ...) -> None:
        """Take the step with a layer, on a mesh with this rank's part of the tokens, and compare all values."""
        inputs = {name: value[part].clone().requires_grad_() for name, value in self.inputs.items()}
        mask = self.mask[part]
        padded = {name: leaf.masked_fill(~mask.unsqueeze(2), float("nan")) for name, leaf in inputs.items()}
        ids = {} if self.ids is None else {"router_inputs": self.ids[part].masked_fill(~mask, -1)}
        output = layer(token_mask=mask, **padded, **ids)
        outputs = [getattr(output, name) for name in self.outputs]
        torch.autograd.backward(outputs, [cotangent[part] for cotangent in self.cotangents])
        for (name, expected), got in zip(self.outputs.items(), outputs, strict=True):
            assert_near(got.detach() * mask.unsqueeze(2), expected[part], 1e-12, name)
        assert not outputs[0][~mask].any()
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in layer.named_parameters()}
        gradients |= {name: leaf.grad for name, leaf in inputs.items()}
        assert gradients.keys() == self.gradients.keys()
        for name, expected in self.gradients.items():
            got, whole = gradients[name], expected[part] if name in inputs else expected
            assert_near(got.full_tensor() if isinstance(got, DTensor) else got, whole, 1e-12, name)


PRESETS = [(preset, 0) for preset in MODELS if preset not in REPLACED_ONLY]


@pytest.mark.parametrize(("preset", "layer"), [*PRESETS, ("deepseek_v4", 1)])
def test_one_process(preset: str, layer: int) -> None:
    step = Step.of(preset, layer=layer)
    step.check(MoE.from_transformers(step.block))


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.parametrize(
    ("num_ranks", "parity"), [(2, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)]
)
def test_ranks(num_ranks: int, parity: int) -> None:
    """Each family with every second of the strategies."""
    steps = {preset: Step.of(preset, **sizes) for preset, sizes in ON_RANKS.items()}
    layers = {preset: MoE.from_transformers(step.block) for preset, step in steps.items()}

    def check() -> None:
        mesh = Mesh({"expert": num_ranks})
        for number, (preset, step) in enumerate(steps.items()):
            for rules, dispatch in STRATEGIES[(number + parity) % 2 :: 2]:
                with named(preset, rules, dispatch):
                    layer = copy.deepcopy(layers[preset])
                    parallelize(layer, mesh, rules, dispatch=dispatch)
                    step.check(layer, token_sharding(mesh, rules).slices(step.mask.shape))

    run_ranks(check, num_ranks)
