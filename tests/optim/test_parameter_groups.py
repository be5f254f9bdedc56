"""The optimizer of a parameter: by logical names, by the usual rule, by overrides; errors if it is unknown."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoE
from maxmoe.families.configs import family_of
from maxmoe.nn import Declaration
from maxmoe.optim import Matrix, Muon, ParameterGroups, parameter_groups
from support.moe_layers import EVERYTHING, make
from support.small_decoder import make as make_decoder
from support.small_models import blocks_of, config_of, model_of


def matrices_of(groups: ParameterGroups) -> dict[str, Matrix]:
    return {choice.name: choice.matrix for choice in groups.choices if choice.matrix is not None}


def test_matrices_of_the_blocks_of_a_decoder() -> None:
    model = make_decoder(num_layers=2)
    expected = {}
    for name, parameter in model.named_parameters():
        of_linear = name.endswith("proj.weight")
        if of_linear or ("experts." in name and name.endswith("_proj")):
            expected[name] = Matrix(-1 if of_linear else -2)
        elif parameter.dim() > 1:
            assert name.endswith(("embedding.weight", "output.weight", "router.weight"))
    assert len(expected) == 4 + 3 + 4 + 3 + 3
    assert matrices_of(parameter_groups(model)) == expected


def test_groups_hold_every_parameter_once() -> None:
    model = make(**EVERYTHING)
    optimizer = Muon(parameter_groups(model, adamw={"lr": 0.5}))
    held = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert held.keys() == dict(model.named_parameters()).keys()
    vectors = {name for name, group in held.items() if group["algorithm"] == "adamw" and group["weight_decay"] == 0}
    assert vectors == {name for name in held if name.endswith(("bias", "output_gate"))}
    assert {group["lr"] for group in held.values() if group["algorithm"] == "adamw"} == {0.5}


def algorithms_of(block: nn.Module) -> dict[str, tuple[str, bool]]:
    """Algorithm of each parameter, and whether its weights decay."""
    groups = parameter_groups(nn.ModuleList([block]), adamw={"weight_decay": 0.1})  # type: ignore[arg-type]
    return {
        name.removeprefix("0."): (group["algorithm"], group.get("weight_decay") != 0)
        for group in groups
        for name, _ in group["params"]
    }


@pytest.mark.parametrize(
    ("preset", "gate_up", "down"),
    [
        ("deepseek_v3", Matrix(-1, "concatenated"), Matrix(-1)),
        ("gpt_oss", Matrix(-2, "interleaved"), Matrix(-2)),
        ("nemotron_h", Matrix(-1), Matrix(-1)),  # without a gate: the stack is up_proj
    ],
)
def test_models_of_transformers_are_updated_as_layers_with_their_weights(
    preset: str, gate_up: Matrix, down: Matrix
) -> None:
    model = model_of(preset)
    groups = parameter_groups(model)
    linear = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected = {name: Matrix() for name in linear if name != "lm_head.weight"}
    stacks = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    expected |= {name: down if name.endswith("down_proj") else gate_up for name in stacks}
    assert stacks and matrices_of(groups) == expected
    assert all(choice.reason.startswith("no names") for choice in groups.choices)
    (block, *_) = blocks_of(model).values()
    theirs, entries = algorithms_of(block), family_of(config_of(preset)).block.entries
    ours = algorithms_of(MoE.from_transformers(block))
    wanted = {name: theirs[entry.key] for entry in entries if entry.key in theirs for name in entry.names}
    assert ours == wanted and ("muon", True) in ours.values()


def test_a_model_without_blocks_is_one_block_and_tied_weights_are_embeddings() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert matrices_of(parameter_groups(model)).keys() == {"0.weight", "1.weight"}
    tied = nn.Module()
    tied.linear, tied.hidden, tied.embedding = nn.Linear(4, 8), nn.Linear(4, 4), nn.Embedding(8, 4)
    tied.linear.weight = tied.embedding.weight
    assert matrices_of(parameter_groups(tied)).keys() == {"hidden.weight"}


class Declared(nn.Module):
    """Fused gate and up [in, out] with logical names."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.gate_up, self.fields = nn.Parameter(torch.randn(3, 4, 10)), fields

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def declaration(self) -> Declaration:
        return Declaration(logical_names={"gate_up": ("exp", "embed_moe", "mlp_moe")}, **self.fields)


def test_declared_matrices() -> None:
    module = Declared(input_dims={"gate_up": "embed_moe"}, fused_gates={"gate_up": "interleaved"})
    assert matrices_of(parameter_groups(module)) == {"gate_up": Matrix(-2, "interleaved")}
    assert matrices_of(parameter_groups(Declared(input_dims={"gate_up": "mlp_moe"}))) == {"gate_up": Matrix(-1)}


@pytest.mark.parametrize(
    ("module", "overrides", "message"),
    [
        (
            Declared(input_dims={"gate_up": "exp"}),
            {},
            "one of the last two logical names of a parameter, got 'gate_up': 'exp'",
        ),
        (Declared(input_dims={"gate": "embed_moe"}), {}, r"got 'gate': 'embed_moe' of \(\)"),
        (
            Declared(fused_gates={"gate_up": "interleaved"}),
            {},
            "of parameters in input_dims, got 'gate_up': 'interleaved'",
        ),
        (
            make(),
            {"experts.up_pro": "adamw"},
            "'experts.up_pro', which matches no trained parameter; the nearest are 'exp",
        ),
        (make(), {"*.up_proj": "sgd"}, r"must be 'adamw' or maxmoe.optim.Matrix, got '\*.up_proj': 'sgd'"),
    ],
)
def test_bad_declarations_and_overrides(module: nn.Module, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parameter_groups(module, overrides)


def test_more_dims_than_names_explain() -> None:
    """One error names all of them and the ways to choose an optimizer."""
    model = nn.ModuleDict({"named": Declared(), "conv": nn.Conv1d(2, 3, 5), "linear": nn.Linear(2, 2)})
    message = (
        r"not known which dims are inputs and outputs of named.gate_up of shape \(3, 4, 10\) with the logical names "
        r"\('exp', 'embed_moe', 'mlp_moe'\); conv.weight of shape \(3, 2, 5\) with no logical names. .*"
        r"overrides=\{'named.gate_up': ...\}: maxmoe.optim.Matrix\(input_dim=-1\)"
    )
    with pytest.raises(ValueError, match=message):
        parameter_groups(model)
    groups = parameter_groups(model, {"named.gate_up": Matrix(-2, "concatenated"), "conv.*": "adamw"})
    assert matrices_of(groups) == {"named.gate_up": Matrix(-2, "concatenated"), "linear.weight": Matrix()}
