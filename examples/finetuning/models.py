"""Small, randomly initialized models of the families in transformers."""

import warnings
from argparse import Namespace
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from maxmoe.quantization import QuantizedWeight
from pretraining import InputError

# Fields that are replaced although they may be None in the config of a family.
OPEN = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts", "head_dim"}
OPEN |= {"num_key_value_heads", "n_shared_experts"}
LARGEST = 100_000_000


def family_names() -> list[str]:
    """Return the families of transformers whose experts maxmoe can compute."""
    # transformers itself looks for the decorator in the source.
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    modules = {path.parent.name for path in files if "@use_experts_implementation" in path.read_text()} | {"llama4"}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if model_type_to_module_name(name) in modules]


def sizes(options: Namespace) -> dict[str, int]:
    """Return sizes by suffix of the config field: families name the same size differently."""
    head_size = options.hidden_size // 4
    return {
        "vocab_size": 256,
        "vocab_size_per_layer_input": 256,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": head_size,
        "num_experts": options.num_experts,
        "num_local_experts": options.num_experts,
        "n_routed_experts": options.num_experts,
        "n_shared_experts": 1,
        "experts_per_tok": options.top_k,
        "top_k_experts": options.top_k,
        "topk": options.top_k,
        "n_group": 1,
        "topk_group": 1,
        "lora_rank": head_size,
        "qk_rope_head_dim": head_size // 2,
        "qk_nope_head_dim": head_size // 2,
        "first_k_dense_replace": 1,
        "num_dense_layers": 1,
        "chunk_size": 16,
    }


def small_config(family: str, options: Namespace) -> PreTrainedConfig:
    """Return a config of a family with the sizes in the options.

    Raises:
        InputError: if transformers has no such family.
    """
    if family not in family_names():
        raise InputError(f"--family {family}: not a language model with experts; there are {', '.join(family_names())}")
    defaults = CONFIG_MAPPING[family]().get_text_config()
    changes: dict[str, Any] = {}
    for name, (end, value) in product(integers(defaults), sizes(options).items()):
        if f"_{name}".endswith(f"_{end}"):
            changes[name] = value
    if "qk_rope_head_dim" in changes:
        changes.pop("head_dim", None)  # it is derived from other fields
    for alias, name in defaults.attribute_map.items():
        if name in changes:
            changes.pop(alias, None)
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    changes |= {name: None for name in tokens if hasattr(defaults, name)}
    return type(defaults)(**changes)


def integers(config: PreTrainedConfig) -> list[str]:
    """Return the fields that are integers or None. Fields with one value per layer cannot be read and are left out."""
    names = []
    for name in [*(field.name for field in fields(config)), *config.attribute_map]:
        try:
            value = getattr(config, name)
        except (AttributeError, ValueError):
            continue
        if type(value) is int or (value is None and name in OPEN):
            names.append(name)
    return names


def small_model(options: Namespace, implementation: str) -> PreTrainedModel:
    """Return a model of `options.family`, with the same parameters for every implementation.

    Raises:
        InputError: if the family does not accept these sizes or has no experts with them.
    """
    try:
        config = small_config(options.family, options)
        with torch.device("meta"):
            num_parameters = sum(value.numel() for value in AutoModelForCausalLM.from_config(config).parameters())
        if num_parameters > LARGEST:
            raise ValueError(f"it would have {num_parameters:,} parameters, at most {LARGEST:,} are small")
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except InputError:
        raise
    except Exception as error:  # each family has its own checks and errors
        reason = " ".join(str(error).split())
        raise InputError(f"cannot make a small model of the family {options.family}: {reason}") from error
    if not any(name.endswith("experts") for name, _ in model.named_modules()):
        raise InputError(f"the first {options.num_layers} layers of the family {options.family} have no experts")
    return model


def with_adapters(model: PreTrainedModel, seed: int) -> PeftModel:
    """Freeze a model, and return it with adapters of PEFT beside all matrices of its experts.

    Args:
        model: model of `small_model`.
        seed: seed of the adapters, so that they are the same for every implementation.
    """
    names = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, weight in (*module.named_parameters(recurse=False), *module.named_children())
        if path.endswith("experts") and isinstance(weight, Tensor | QuantizedWeight) and weight.dim() == 3
    ]
    torch.manual_seed(seed)
    adapters = LoraConfig(r=8, lora_alpha=16, target_parameters=names, target_modules=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a deprecated property of transformers
        return get_peft_model(model, adapters)
