"""Presets: the published configs, and the configs of transformers."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers")

import transformers

from maxmoe import presets
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.step3p7 import LimitedOutput
from maxmoe.families.zaya import RouterMLP
from support import small_models
from support.messages import containing
from support.moe_layers import assert_meets_specification, make

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "published_configs.yaml").read_text())
PUBLISHED["dbrx"]["ffn_config"] = SimpleNamespace(**PUBLISHED["dbrx"]["ffn_config"])
PUBLISHED["deepseek_v4"]["mlp_layer_types"] = ["hash_moe"] * 3 + ["moe"] * 40
PUBLISHED["step3p7"]["swiglu_limits"] = [0.0] * 43 + [7.0] * 2
PUBLISHED["step3p7"]["swiglu_limits_shared"] = [0.0] * 43 + [16.0] * 2
# The other models have the numbers that their config has by default in transformers.
for _name in small_models.MODELS.keys() - PUBLISHED.keys():
    _config = small_models.config_class(_name)()
    PUBLISHED[_name] = {**vars(_config), "model_type": _config.model_type}
PUBLISHED = dict(sorted(PUBLISHED.items()))
each_preset = pytest.mark.parametrize("name", PUBLISHED)


def public_config(name: str, **overrides: Any) -> SimpleNamespace:
    return SimpleNamespace(**(PUBLISHED[name] | overrides))


def test_every_preset_is_tested() -> None:
    assert set(presets.__all__) == {"from_transformers", *PUBLISHED}
    assert set(PUBLISHED) == set(small_models.MODELS)
    with pytest.raises(
        AttributeError, match="no 'deepseek_v33'; the nearest are 'deepseek_v3', 'deepseek_v4', 'deepseek_v2'"
    ):
        presets.deepseek_v33()


@each_preset
def test_preset_is_the_published_config(name: str) -> None:
    # Presets explain weights that differ from the config, because the model was trained with others.
    trained_with = {"olmoe": 0.01, "gpt_oss": 0.0}
    config = presets.from_transformers(public_config(name), layer=3)  # the first sparse layer of Step-3.7
    if name in trained_with:
        assert config.load_balance_loss_weight == PUBLISHED[name]["router_aux_loss_coef"] * config.top_k
        config = dataclasses.replace(config, load_balance_loss_weight=trained_with[name])
    preset = getattr(presets, name)
    assert preset() == config
    values = {"hidden_size": 24, "num_experts": 48, "implementation": "dense", "load_balance_loss_weight": 0.5}
    assert preset(**values) == dataclasses.replace(preset(), **values)
    with pytest.raises(TypeError, match="num_expert"):
        preset(num_expert=4)


@each_preset
def test_config_of_transformers_is_the_preset_of_its_size(name: str) -> None:
    config = presets.from_transformers(small_models.config_of(name), layer=0)
    fields = """hidden_size intermediate_size num_experts zero_computation top_k num_shared_experts latent_size router
        expert_norms activation num_groups top_k_groups routed_scaling_factor load_balance_loss_weight activation_limit
        score_correction_bias"""
    values = {field: getattr(config, field) for field in fields.split()}
    assert config == getattr(presets, name)(**values)
    assert (config.hidden_size, config.intermediate_size) == (16, 10)
    theirs = small_models.config_of(name)
    attributes = vars(theirs) | vars(getattr(theirs, "ffn_config", theirs))
    assert config.num_experts in {
        attributes.get(f"{kind}_experts") for kind in ("num", "num_local", "n_routed", "moe_num")
    }
    names = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
    assert config.top_k == next((attributes[each] for each in names if each in attributes), 1)


@each_preset
def test_small_layer_meets_the_specification(name: str) -> None:
    """With the rules of the family, which its file has in loops as well."""
    config = presets.from_transformers(small_models.config_of(name), layer=0)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert_meets_specification(make(**fields | {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}))


def test_layers_of_a_model_that_differ() -> None:
    last = presets.from_transformers(public_config("step3p7"), layer=44)
    assert last == presets.step3p7(activation=LimitedOutput(limit=7.0, shared_limit=16.0))
    assert presets.from_transformers(public_config("zaya"), layer=0) == presets.zaya(router=RouterMLP(hidden_size=256))
    hashed = presets.from_transformers(public_config("deepseek_v4"), layer=2)
    assert hashed == presets.deepseek_v4(router=HashRouting(num_ids=129280), score_correction_bias=False)
    with pytest.raises(ValueError, match=r"layer must be in \[0, num_hidden_layers \(40\)\), got 40"):
        presets.from_transformers(public_config("zaya"), layer=40)
    same = public_config("step3p7", swiglu_limits=[7.0] * 45, swiglu_limits_shared=None)
    assert presets.from_transformers(same) == presets.step3p7(activation=LimitedOutput(limit=7.0))


def test_multimodal_config() -> None:
    text = small_models.config_of("llama4")
    assert presets.from_transformers(transformers.Llama4Config(text_config=text)) == presets.from_transformers(text)


def without(name: str, attribute: str) -> SimpleNamespace:
    config = public_config(name)
    delattr(config, attribute)
    return config


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "other_family": (SimpleNamespace(model_type="bert"), ("model_type", "mixtral", "gpt_oss", "'bert'")),
    "no_config": (7, ("model_type", "int", "None")),
    "missing": (without("mixtral", "num_local_experts"), ("num_local_experts", "mixtral", "5.20")),
    "nothing": (public_config("qwen3_moe", moe_intermediate_size=None), ("moe_intermediate_size", "qwen3_moe")),
    "coefficient": (without("olmoe", "router_aux_loss_coef"), ("router_aux_loss_coef", "olmoe")),
    "top_k": (
        public_config("mixtral", num_experts_per_tok=9),
        ("top_k (9)", "num_experts (8)", "top_k is its num_experts_per_tok", "num_experts is its num_local_experts"),
    ),
    "groups": (public_config("deepseek_v3", n_group=7), ("num_groups (7)", "(256)", "num_groups is its n_group")),
    "activation": (public_config("llama4", hidden_act="quick_gelu"), ("activation is its hidden_act", "'quick_gelu'")),
    "shared": (public_config("qwen2_moe", shared_expert_intermediate_size=2561), ("(2561)", "(2560)", "multiple")),
    "no_width": (public_config("qwen3_next", moe_intermediate_size=0), ("moe_intermediate_size", "positive int", "0")),
    "text_bool": (public_config("qwen3_moe", norm_topk_prob="no"), ("norm_topk_prob", "qwen3_moe", "'no'")),
    "text_coefficient": (public_config("mixtral", router_aux_loss_coef="0.02"), ("router_aux_loss_coef", "'0.02'")),
    "list": (public_config("mixtral", hidden_act=["silu"]), ("activation is its hidden_act", "['silu']")),
    "nan": (public_config("deepseek_v3", routed_scaling_factor=float("nan")), ("routed_scaling_factor", "nan")),
    "jitter": (public_config("mixtral", router_jitter_noise=0.1), ("router_jitter_noise", "0.0", "0.1")),
    "p_norm": (
        public_config("dbrx", ffn_config=SimpleNamespace(moe_normalize_expert_weights=2.0)),
        ("ffn_config.moe_normalize_expert_weights of a dbrx config", "1 or None", "2.0"),
    ),
    "dropout": (public_config("switch_transformers", dropout_rate=0.1), ("dropout_rate", "0.0", "0.1")),
    "wrong_there": (SimpleNamespace(model_type="nllb-moe"), ("'nllb-moe'", "NllbMoeExperts", "experts 0 and 1")),
    "score": (public_config("kimi_k2", scoring_func="softmax"), ("scoring_func", "kimi_k2", "'sigmoid'", "'softmax'")),
    "alpha": (public_config("gpt_oss", swiglu_alpha=1.5), ("swiglu_alpha", "1.702", "1.5")),
    "normalised": (public_config("deepseek_v2", norm_topk_prob=True), ("norm_topk_prob", "False", "True")),
    "layers": (
        public_config("step3p7"),
        ("layer must be given", "step3p5", "limit=None, shared_limit=None) in layer 0", "limit=7.0, "),
    ),
    "method": (
        public_config("deepseek_v2", topk_method="noaux_tc"),
        ("topk_method", "'greedy'", "'group_limited_greedy'", "'noaux_tc'"),
    ),
}


@pytest.mark.parametrize(("config", "words"), WRONG.values(), ids=WRONG)
def test_errors(config: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=containing(*words)):
        presets.from_transformers(config)


def test_activation_has_other_names_there() -> None:
    names = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "relu2": "relu2"}
    for theirs, ours in names.items():
        assert presets.from_transformers(public_config("mixtral", hidden_act=theirs)).activation == ours
