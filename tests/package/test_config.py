"""MoEConfig: accepted values, and errors that name the argument and both values."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
import warnings
from typing import Any, get_args

import numpy as np
import pytest

from maxmoe import ExpertNorms, SiTU, ZeroComputation
from maxmoe.config.components import Component
from maxmoe.config.moe_config import _MOVED, MoEConfig, Normalization
from maxmoe.families.step3p7 import LimitedOutput
from maxmoe.nn import Selection

SITU = SiTU(gate_softcap=1.5, up_softcap=0.8)
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 6, "top_k": 2}


def test_is_a_frozen_value_of_keywords() -> None:
    config = MoEConfig(**SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        MoEConfig(8, 4, 6, 2)  # type: ignore[misc]
    assert config == MoEConfig(**SIZES)
    assert hash(config) == hash(MoEConfig(**SIZES))
    assert dataclasses.replace(config, top_k=3).top_k == 3
    assert MoEConfig(**dataclasses.asdict(config)) == config


def test_an_unknown_keyword_gets_the_nearest_field() -> None:
    with pytest.raises(TypeError, match="MoEConfig has no field 'hiden_size'; the nearest are 'hidden_size'"):
        MoEConfig(**SIZES, hiden_size=8)  # type: ignore[call-arg]
    assert list(inspect.signature(MoEConfig).parameters) == [field.name for field in dataclasses.fields(MoEConfig)]
    assert pickle.loads(pickle.dumps(MoEConfig(**SIZES))) == copy.deepcopy(MoEConfig(**SIZES))


WITH_COMPONENTS: dict[str, Any] = {
    "zero_computation": ZeroComputation(zero=1),
    "expert_norms": ExpertNorms(output=True),
    "router": Selection(by="logits", other_groups="zero"),
    "activation": SiTU(gate_softcap=4.0, up_softcap=25.0),
}


def test_is_saved_as_json() -> None:
    config = MoEConfig(**SIZES, **WITH_COMPONENTS)
    saved = json.loads(json.dumps(dataclasses.asdict(config)))
    assert saved["router"] == {"kind": "Selection", "by": "logits", "group_score": "top2", "other_groups": "zero"}
    assert MoEConfig(**saved) == config and hash(MoEConfig(**saved)) == hash(config)


def test_fields_of_earlier_versions() -> None:
    """Saved configs have all fields; one with an effect says where it is now."""
    without_effect = {name: value for name, (value, _) in _MOVED.items()}
    assert MoEConfig(**SIZES, **without_effect) == MoEConfig(**SIZES)
    for name in _MOVED:
        with pytest.raises(ValueError, match=rf"MoEConfig has no field '{name}' \(17\) any more: give \w+=\w+\("):
            MoEConfig(**SIZES, **{**without_effect, name: 17})


FIELDS = dataclasses.fields(MoEConfig)
WRONG_TYPES = {
    "int": ("7", 7.0, True, None, float("nan"), np.int64(7), [7]),
    "float": ("7", "nan", True, [7.0], 1j, float("nan"), float("inf"), -float("inf"), -1.0, np.float32(1)),
    "bool": ("no", "True", 0, 1, 1.0, None, np.True_),
    "component": (7, 1.0, True, [1], "zero"),
    "str": (7, None, "Silu", "", ["silu"], np.array(["silu", "sum"])),
}


def kind_of(field: "dataclasses.Field[Any]") -> str:
    """The type of a field, without the None that some accept."""
    types = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    names_or_numbers = [kind for kind in types if not (isinstance(kind, type) and issubclass(kind, Component))]
    if not names_or_numbers:
        return "component"
    return names_or_numbers[0].__name__ if isinstance(names_or_numbers[0], type) else "str"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_value_of_another_type_is_named(field: "dataclasses.Field[Any]") -> None:
    for value in WRONG_TYPES[kind_of(field)]:
        if value is None and field.default is None:
            continue
        with pytest.raises(ValueError, match=f"^{field.name} must be .*, got {re.escape(repr(value))}$"):
            MoEConfig(**{**SIZES, field.name: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({name: 0}, (name, "positive int", "0")) for name in SIZES),
        ({"num_shared_experts": -1}, ("num_shared_experts", "-1")),
        ({"top_k": 7}, ("top_k", "7", "num_experts", "6")),
        ({"num_groups": 4}, ("num_groups", "4", "num_experts", "6")),
        ({"num_groups": 2, "top_k_groups": 3}, ("top_k_groups", "3", "num_groups", "2")),
        ({"num_groups": 3, "top_k": 3}, ("top_k", "3", "2 experts", "top_k_groups", "1")),
        ({"activation": "swish"}, ("activation", "silu", "swish")),
        ({"router": "hash"}, ("router", "learned", "hash")),
        ({"activation": "swigluoai", "gated": False}, ("swigluoai", "gated=True", "False")),
        ({"activation_limit": 7.0, "gated": False}, ("activation_limit", "7.0", "gated=True", "False")),
        ({"activation": LimitedOutput(shared_limit=7.0)}, ("shared_limit", "7.0", "num_shared_experts", "0")),
        ({"activation": LimitedOutput(limit=7.0), "gated": False}, ("LimitedOutput", "gated=True", "False")),
        ({"activation": LimitedOutput(), "activation_limit": 7.0}, ("LimitedOutput", "activation_limit=None", "7.0")),
        ({"activation": "situ"}, ("situ", "SiTU(gate_softcap=")),
        ({"activation": SITU, "gated": False}, ("SiTU", "gated=True", "False")),
        ({"activation": SITU, "activation_limit": 7.0}, ("SiTU", "activation_limit=None", "7.0")),
        ({"activation": {"kind": "SiTu"}}, ("activation", "SiTu", "the nearest are 'SiTU'")),
        ({"router": {"kind": "SiTU", **dataclasses.asdict(SITU)}}, ("router", "Selection", "SiTU(")),
        ({"activation_limit": 0.0}, ("activation_limit", "> 0", "0.0")),
        ({"shared_expert_gate": True}, ("shared_expert_gate", "num_shared_experts", "0")),
        (
            {"correction_bias_update_rate": 0.1},
            ("correction_bias_update_rate", "0.1", "score_correction_bias", "False"),
        ),
        ({"capacity_factor": 0.0, "implementation": "dense"}, ("capacity_factor", "> 0", "0.0")),
        ({"capacity_factor": 1.0}, ("capacity_factor", "1.0", "dense", "sparse")),
        ({"buffer_factor": 6.5}, ("buffer_factor", "6.5", "num_experts", "6")),
        ({"capacity_factor": 1e9, "implementation": "dense"}, ("capacity_factor", "1000000000.0", "num_experts", "6")),
        ({"routed_scaling_factor": -0.0}, ("routed_scaling_factor", "> 0", "-0.0")),
        ({"routed_scaling_factor": 1e39}, ("routed_scaling_factor", "finite", "1e+39")),
        ({"hidden_size": 2**31}, ("hidden_size", "2^31", "2147483648")),
        ({"buffer_factor": 2.0, "implementation": "dense"}, ("buffer_factor", "2.0", "sparse", "dense")),
        ({"overflow": "chunks"}, ("overflow='chunks'", "buffer_factor", "None")),
    ],
    ids=str,
)
def test_refuses_and_names_both_values(changes: dict[str, Any], named: tuple[str, ...]) -> None:
    everything = "".join(f"(?=.*{re.escape(word)})" for word in named)
    with pytest.raises(ValueError, match=everything):
        MoEConfig(**{**SIZES, **changes})


def of(kind: str, **fields: Any) -> dict[str, Any]:
    """A component as in a saved config, which the config makes."""
    return {"kind": kind, **fields}


SCORED = {"score_function": "sigmoid", "num_shared_experts": 2, "router": of("SharedExpertScores", scale=False)}
QUANTILE = {
    **{"score_function": "sigmoid", "score_correction_bias": True, "correction_bias_rule": "quantile"},
    "correction_bias_update_rate": 1.0,
}
COMPONENTS: list[tuple[dict[str, Any], str]] = [
    ({"latent_size": 0}, "latent_size must be a positive int, got 0"),
    (
        {"expert_norms": of("ExpertNorms", latent_in=True)},
        r"ExpertNorms\(latent_in=True.* needs a latent_size",
    ),
    (
        {"expert_norms": of("ExpertNorms", output=True), "apply_weights_to": "input"},
        "output=True.* needs apply_weights_to='output', got 'input'",
    ),
    ({"expert_norms": of("ExpertNorms", output_eps=-1.0)}, "output_eps must be a finite float > 0, got -1.0"),
    ({"router": of("ScaledLogits", scale=0.0)}, r"scale must be a finite float > 0, got 0\.0"),
    ({"zero_computation": of("ZeroComputation", constant=True)}, "constant must be an int >= 0, got True"),
    (
        {"zero_computation": of("ZeroComputation", zero=2), "top_k": 9},
        r"top_k \(9\) must not exceed num_experts \(6\) \+ ZeroComputation\(zero=2, copy=0, constant=0\)$",
    ),
    (
        {"zero_computation": of("ZeroComputation", copy=2), "num_groups": 2, "top_k_groups": 2},
        r"ZeroComputation\(.*\) needs num_groups=1, got 2",
    ),
    (
        {"zero_computation": of("ZeroComputation", constant=2), "apply_weights_to": "input"},
        r"constant=2\) needs apply_weights_to='output', got 'input'",
    ),
    (
        {"zero_computation": of("ZeroComputation", copy=2), "buffer_factor": 8.5},
        r"buffer_factor \(8\.5\) must not exceed num_experts \(6\) \+ ",
    ),
    ({**SCORED, "num_shared_experts": 0}, r"SharedExpertScores\(scale=False\) needs num_shared_experts >= 1, got 0"),
    ({**SCORED, "score_function": "softmax"}, "needs score_function='sigmoid', got 'softmax'"),
    ({**SCORED, "normalization": "none"}, "needs normalization='sum', got 'none'"),
    ({**SCORED, "apply_weights_to": "input"}, "needs apply_weights_to='output', got 'input'"),
    ({**SCORED, "shared_expert_gate": True}, "needs shared_expert_gate=False, got True"),
    (
        {"router": of("DocumentPools", min_size=1, max_size=4)},
        r"min_size must be in \[top_k \(2\), .*, got 1",
    ),
    ({"router": of("DocumentPools", min_size=2, max_size=7)}, r"max_size must be in .* experts \(6\)\], got 7"),
    (
        {"router": of("HashRouting", num_ids=5), "score_correction_bias": True},
        r"HashRouting\(num_ids=5\) needs score_correction_bias=False, got True",
    ),
    (
        {**QUANTILE, "score_correction_bias": False, "correction_bias_update_rate": 0.0},
        "^correction_bias_rule='quantile' needs score_correction_bias=True, got False$",
    ),
    ({**QUANTILE, "score_function": "identity"}, "score_function='sigmoid' or 'softmax', got 'identity'$"),
    ({**QUANTILE, "num_groups": 2}, "needs num_groups=1, got 2$"),
    ({**QUANTILE, "router": of("Selection", by="logits")}, "needs a router that selects by scores, got router=Sel"),
    ({**QUANTILE, "top_k": 6}, r"top_k \(6\) below the number of experts \(6\)$"),
    ({**QUANTILE, "correction_bias_update_rate": 1.5}, "needs correction_bias_update_rate <= 1, got 1.5$"),
]


@pytest.mark.parametrize(("changes", "message"), COMPONENTS, ids=str)
def test_refuses_components(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("normalization", ["sum", "softmax"])
def test_a_router_without_gradient_is_warned_of_once(normalization: Normalization) -> None:
    fields: dict[str, Any] = {**SIZES, "top_k": 1, "normalization": normalization}
    message = f"top_k=1 with normalization='{normalization}' makes every routing weight constant"
    with pytest.warns(UserWarning, match=f"^{message}.* set normalization='none'"):
        MoEConfig(**fields, load_balance_loss_weight=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's default
        for _ in range(2):
            config = MoEConfig(**fields)
            dataclasses.replace(config, buffer_factor=1.0)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "harmless", [{"normalization": "none"}, {"router": "random"}, {"num_experts": 1}, {"top_k": 2}], ids=str
)
def test_nothing_is_warned_of_where_no_router_learns_less(harmless: dict[str, Any]) -> None:
    MoEConfig(**{**SIZES, "top_k": 1, **harmless})  # a warning is an error in the tests
