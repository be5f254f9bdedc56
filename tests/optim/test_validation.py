"""Groups, parameters, gradients and state dicts that Muon refuses, each with a name and both values."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from maxmoe.optim import Muon, parameter_groups
from support.moe_layers import make


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (4, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentun": 0.9}, "a group of muon has no option 'momentun'; the nearest are 'momentum'"),
        ({"betas": (0.9, 0.9)}, "a group of muon has no option 'betas'"),
        ({"algorithm": "adamw", "momentum": 0.9}, "a group of adamw has no option 'momentum'"),
        ({"algorithm": "adam"}, r"algorithm must be one of \['adamw', 'muon'\], got 'adam'"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"adjust_lr_fn": "spectral"}, r"adjust_lr_fn must be one of \(None, 'original', .*got 'spectral'"),
        ({"ns_dtype": torch.float32}, "a group of muon has no option 'ns_dtype'"),
        ({"input_dim": 1}, r"input_dim must be one of \(-1, -2\), got 1"),
        ({"fused_gate": "stacked"}, "fused_gate must be one of .*got 'stacked'"),
        ({"fused_gate": "interleaved", "input_dim": -2}, r"w must have an even number of outputs .* shape \(4, 3\)"),
    ],
)
def test_options_of_a_group(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^ns_dtype must be one of .*got torch.float16"):
        Muon([matrix()], ns_dtype=torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("w", matrix())], **options}])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (matrix(2, 4, 3), r"w must be a matrix, got the shape \(2, 4, 3\); stacks of matrices need input_dim"),
        (matrix(4), r"w must be a matrix, got the shape \(4,\)"),
        (nn.Parameter(torch.randn(2, 2, dtype=torch.complex64)), "w must be floating and real, got torch.complex64"),
    ],
)
def test_parameters_that_are_no_matrices(parameter: nn.Parameter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([("w", parameter)])


def test_no_matrices_at_all() -> None:
    with pytest.raises(ValueError, match=r"Muon got no matrices, only parameters for AdamW: 0\.weight, 1\.weight"):
        Muon(parameter_groups(nn.Sequential(nn.Embedding(3, 4), nn.RMSNorm(4))))


def stepped(model: nn.Module) -> Muon:
    optimizer = Muon(parameter_groups(model))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_state_dicts_go_round(tmp_path: Any) -> None:
    """A state dict is saved to a file and read without pickle: the next step has the same bits."""
    one, other = make(num_shared_experts=1), make(num_shared_experts=1)
    optimizer = stepped(one)
    other.load_state_dict(one.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = Muon(parameter_groups(other), lr=7.0)
    loaded.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for name, parameter in other.named_parameters():
        parameter.grad = one.get_parameter(name).grad
    optimizer.step()
    loaded.step()
    for name, parameter in other.named_parameters():
        assert parameter.equal(one.get_parameter(name)), name
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    copied.add_param_group({"params": [("extra", matrix())]})
    copied.step()


def test_state_dicts_of_others() -> None:
    layer = make(num_shared_experts=1)
    optimizer = stepped(layer)
    before = copy.deepcopy(optimizer.state_dict())

    def refused(state_dict: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert str(optimizer.state_dict()) == str(before)

    adamw = torch.optim.AdamW(layer.parameters())
    adamw.step()
    refused(adamw.state_dict(), r"must be of maxmoe.optim.Muon, got .*'betas'.* load the model")
    with pytest.raises(ValueError, match="parameter groups"):
        adamw.load_state_dict(optimizer.state_dict())
    refused(
        stepped(make()).state_dict(),
        r"must have the parameters of the optimizer in their order, got 4 instead of 7; only one of them has "
        r"\('muon', 'shared_experts.down_proj'\)",
    )
    refused(
        stepped(make(num_shared_experts=1, router_bias=True)).state_dict(), r"only one .* \('adamw', 'router.bias'\)"
    )
    without_names = copy.deepcopy(before)
    for group in without_names["param_groups"]:
        del group["param_names"]
    refused(without_names, r"got 7 instead of 7; only one of them has \('adamw', 'router.weight'\), \('adamw', 0\), ")
    swapped = copy.deepcopy(before)
    swapped["param_groups"].reverse()
    refused(swapped, "in their order, got 7 instead of 7; only one of them has none")
    refused(
        stepped(make(num_shared_experts=1, num_experts=4)).state_dict(),
        r"momentum_buffer of the parameter experts.gate_proj must have its shape \(6, 7, 5\), got \(4, 7, 5\)|"
        r"exp_avg of the parameter router.weight must have its shape \(6, 7\), got \(4, 7\)",
    )
