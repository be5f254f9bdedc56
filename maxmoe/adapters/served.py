"""One adapter of a model of PEFT in parts, for inference servers. Parts that a server would drop or misread raise.

Servers read the two factors of each adapted matrix, and one rank and one scale for all of them from the config. Factors
of a lower rank get rows and columns of zeros, another scale is multiplied into B: the product stays the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

from maxmoe.adapters.layouts import with_zeros
from maxmoe.adapters.peft import unwrapped_name, wrappers_of
from maxmoe.checks.whole_tensors import check_whole
from maxmoe.ops import LowRankFactors

# Initializations that change the weights beside the adapter, which a server has as they were.
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_FACTORS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


class ServedAdapter(NamedTuple):
    """An adapter of a model of PEFT, and one rank and one scale for all factors."""

    # By the path of the module of experts in the model that PEFT wraps, then by parameter, in the parameter's layout
    # and with their own ranks and scales.
    experts: Mapping[str, Mapping[str, LowRankFactors]]
    others: Mapping[str, Tensor]  # factors of other modules with this rank and scale, by their names in a file of PEFT
    rank: int
    scale: float
    config: Mapping[str, Any]  # as in a file of PEFT


def served_adapter(model: nn.Module, adapter: str | None) -> ServedAdapter:
    """Return the parts of an adapter of a model of PEFT, by default of the active one."""
    from peft import PeftModel, get_peft_model_state_dict

    from maxmoe.adapters import _peft

    if not isinstance(model, PeftModel):
        raise ValueError(f"export_adapter needs a model of PEFT, got {type(model).__name__}")
    active = model.active_adapters
    if adapter is None and len(active) != 1:
        raise ValueError(f"adapter must be one of {[*model.peft_config]}, because several are active: {active}")
    name = active[0] if adapter is None else adapter
    if name not in model.peft_config:
        raise ValueError(f"adapter must be one of {[*model.peft_config]}, got {name!r}")
    config = model.peft_config[name]
    check_config(config.to_dict())
    others = get_peft_model_state_dict(model, adapter_name=name)
    check_whole("export_adapter", others)
    experts: dict[str, dict[str, LowRankFactors]] = {}
    for path, wrapper in wrappers_of(model):
        if name in wrapper.lora_A:
            experts.setdefault(unwrapped_name(path), {})[wrapper.parameter_name] = _peft.factors_of_adapter(
                wrapper, name
            )
            for factor in ("lora_A", "lora_B"):
                del others[f"{path}.{factor}.weight"]
    _check_names(others)
    scales = _scales(model, name)
    rank = max(rank for rank, _ in scales.values())
    scale = common_scale(scale for _, scale in scales.values())
    for key, factor in others.items():
        path, _, kind = key.rpartition(".lora_")
        is_b = kind.removeprefix("embedding_").startswith("B")
        others[key] = with_zeros(factor, 1, rank) * (scales[path][1] / scale) if is_b else with_zeros(factor, 0, rank)
    return ServedAdapter(experts, others, rank, scale, config.to_dict())


def common_scale(scales: Iterable[float]) -> float:
    """Return the most frequent scale, so that as few factors as possible are multiplied; the largest of several."""
    counts = Counter(scale for scale in scales if scale)
    return max(counts, key=lambda scale: (counts[scale], scale), default=1.0)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise for fields of a config that ask for more than two factors of each matrix."""
    if config["peft_type"] != "LORA":
        raise ValueError(f"servers read adapters of the type LORA, got {config['peft_type']}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_CHANGE_WEIGHTS):
        raise ValueError(
            f"init_lora_weights={init!r} has changed the weights beside the adapter, which a server has as they were: "
            "save it with PEFT's path_initial_model_for_weight_conversion, load that, and export it"
        )
    for field in ("modules_to_save", "trainable_token_indices", "layer_replication", "alora_invocation_tokens"):
        if config.get(field):
            raise ValueError(f"servers do not read {field} of an adapter, got {config[field]}")


def served_config(
    config: Mapping[str, Any], rank: int, scale: float, modules: Set[str], projections: Set[str]
) -> dict[str, Any]:
    """Return a config with one rank and one scale, and modules by their names.

    SGLang knows the projections of experts by these names whatever the names of the tensors are, and computes the scale
    as lora_alpha / r also with use_rslora.

    Args:
        config: config of the adapter as it was.
        rank: rank of all factors.
        scale: scale of all products.
        modules: paths of the adapted modules beside experts.
        projections: names of the projections of an expert.
    """
    alpha = scale * rank
    return {
        **{key: config.get(key) for key in ("base_model_name_or_path", "task_type", "revision")},
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules} | projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _check_names(others: Mapping[str, Tensor]) -> None:
    """Raise for tensors of an adapter that are not the factors of a module."""
    for name, tensor in others.items():
        if not name.endswith(_FACTORS) or tensor.dim() != 2:
            raise ValueError(
                f"servers read factors of two dims {[*_FACTORS]}, got {name} of shape {(*tensor.shape,)}: train the "
                "adapter without it, or merge it"
            )


def _scales(model: nn.Module, adapter: str) -> dict[str, tuple[int, float]]:
    """Return rank and scale of the modules with an adapter by their paths; raise for what is more than two factors."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found: dict[str, tuple[int, float]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer) or adapter not in module.scaling:
            continue
        if adapter in module.lora_variant:
            variant = type(module.lora_variant[adapter]).__name__
            raise ValueError(f"servers do not know the variant {variant} of the adapter of {path}")
        if isinstance(module, ParamWrapper) and module.get_param().dim() != 3:  # type: ignore[no-untyped-call]
            raise ValueError(
                f"servers read adapters of linear modules and of experts, got one of {path}.{module.parameter_name}: "
                "merge it, or leave it out of target_parameters"
            )
        found[path] = module.r[adapter], float(module.scaling[adapter])
    return found
