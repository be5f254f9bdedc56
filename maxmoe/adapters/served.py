"""One adapter of a model of PEFT in parts, for inference servers. Parts that a server would drop or misread raise.

Servers read the two factors of each adapted matrix, and one rank and one scale for all of them from the config.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from maxmoe.adapters.peft import wrappers_of
from maxmoe.checks.whole_tensors import check_whole
from maxmoe.ops import LowRankFactors

# Initializations that change the weights beside the adapter, which a server has as they were.
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_FACTORS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


class ServedAdapter(NamedTuple):
    """An adapter of a model of PEFT, with one rank and one scale for all factors."""

    # By the path of the module of experts in the model that PEFT wraps, then by parameter, in the parameter's layout.
    experts: Mapping[str, Mapping[str, LowRankFactors]]
    others: Mapping[str, Tensor]  # factors of other modules, by their names in a file of PEFT
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
    _check_config(config)
    others = get_peft_model_state_dict(model, adapter_name=name)
    check_whole("export_adapter", others)
    experts: dict[str, dict[str, LowRankFactors]] = {}
    for path, wrapper in wrappers_of(model):
        if name in wrapper.lora_A:
            owner = path.removeprefix("base_model.model.")
            while owner.endswith(".base_layer"):
                owner = owner.removesuffix(".base_layer")
            experts.setdefault(owner, {})[wrapper.parameter_name] = _peft.factors_of_adapter(wrapper, name)
            for factor in ("lora_A", "lora_B"):
                del others[f"{path}.{factor}.weight"]
    _check_names(others)
    rank, scale = _rank_and_scale(model, name)
    return ServedAdapter(experts, others, rank, scale, config.to_dict())


def _check_config(config: Any) -> None:
    """Raise for fields of a config that ask for more than two factors of each matrix."""
    if config.peft_type != "LORA":
        raise ValueError(f"servers read adapters of the type LORA, got {config.peft_type}")
    init = config.init_lora_weights
    if isinstance(init, str) and init.startswith(_CHANGE_WEIGHTS):
        raise ValueError(
            f"init_lora_weights={init!r} has changed the weights beside the adapter, which a server has as they were: "
            "save it with PEFT's path_initial_model_for_weight_conversion, load that, and export it"
        )
    for field in ("modules_to_save", "trainable_token_indices", "layer_replication", "alora_invocation_tokens"):
        if getattr(config, field, None):
            raise ValueError(f"servers do not read {field} of an adapter, got {getattr(config, field)}")


def _check_names(others: Mapping[str, Tensor]) -> None:
    """Raise for tensors of an adapter that are not the factors of a module."""
    for name, tensor in others.items():
        if not name.endswith(_FACTORS) or tensor.dim() != 2:
            raise ValueError(
                f"servers read factors of two dims {[*_FACTORS]}, got {name} of shape {(*tensor.shape,)}: train the "
                "adapter without it, or merge it"
            )


def _rank_and_scale(model: nn.Module, adapter: str) -> tuple[int, float]:
    """Return rank and scale of all modules with an adapter; raise if they differ, as servers read one for all."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found: dict[tuple[int, float], str] = {}
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
        found.setdefault((module.r[adapter], float(module.scaling[adapter])), path)
    if len(found) > 1:
        listed = ", ".join(f"r={rank} and scale {scale:g} of {path}" for (rank, scale), path in found.items())
        raise ValueError(f"servers read one rank and one scale for all modules of an adapter, got {listed}")
    ((rank, scale),) = found
    return rank, scale
