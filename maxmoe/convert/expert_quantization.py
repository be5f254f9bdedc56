"""Quantization of the experts of a model in place."""

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from maxmoe.adapters import wrappers_of
from maxmoe.checks.whole_tensors import check_whole
from maxmoe.declaration import expert_matrices
from maxmoe.quantization import QuantizedStack, QuantizedWeight, put_stack, quantize


def quantize_experts(model: nn.Module, format: str, *, group_size: int | None = None) -> None:
    """Quantize the frozen experts of a model in place.

    The weights of the routed experts of `maxmoe.MoE`, and of models of transformers with
    ``experts_implementation="maxmoe"``, become `maxmoe.quantization.QuantizedWeight`, whose codes and scales are
    parameters. Biases, routers, shared experts and all other parameters are left as they are. Adapters of PEFT may be
    added before or after.

    Each parameter is freed as soon as it has been quantized, one expert after the other. The peak memory is the
    model plus its largest quantized parameter.

    Args:
        model: model with frozen experts, not sharded. On the meta device, the quantized weights have no memory either.
        format: name of a format in `maxmoe.quantization.FORMATS`.
        group_size: number of weights that share a scale, for "int4"; None for 128.

    Raises:
        ValueError: for a model without experts, for experts that are trainable, sharded, quantized already or have
            merged adapters, and for weights that are not finite. For the last alone, experts before them have been
            quantized.
    """
    found = [
        (f"{path}.{name}".removeprefix("."), module, name, is_first_in)
        for path, module in model.named_modules()
        for name, is_first_in in expert_matrices(module).items()
    ]
    if not found:
        raise ValueError(
            "the model must have experts that maxmoe computes, got none: a model of transformers needs "
            'experts_implementation="maxmoe" and import maxmoe.integrations.transformers'
        )
    for path, module, name, _ in found:
        _check(path, getattr(module, name))
    for path, wrapper in wrappers_of(model):
        if wrapper.merged_adapters:  # PEFT could not subtract them again
            raise ValueError(
                f"{path} must have no merged adapters, got {list(wrapper.merged_adapters)}: call merge_and_unload or "
                "unmerge_adapter before quantize_experts"
            )
    # By tied parameters, stored as (L, out, in) and as (L, in, out); others are freed when they have been replaced.
    quantized: tuple[WeakIdKeyDictionary, WeakIdKeyDictionary] = (WeakIdKeyDictionary(), WeakIdKeyDictionary())
    for path, module, name, is_first_in in found:
        parameter, known = module.get_parameter(name), quantized[is_first_in]
        if parameter not in known:
            try:
                stack = quantize(parameter if is_first_in else parameter.mT, format, group_size)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            known[parameter] = QuantizedWeight(stack if is_first_in else stack.mT)
        put_stack(module, name, known[parameter])
        del parameter  # otherwise it would be held while the next one is quantized


def _check(name: str, parameter: Tensor | QuantizedStack) -> None:
    if isinstance(parameter, QuantizedStack):
        raise ValueError(f"{name} must not be quantized yet, got {parameter.format}")
    check_whole("quantize_experts", {name: parameter})
    if parameter.requires_grad:
        raise ValueError(
            f"{name} must be frozen, because quantized weights have no gradient, got requires_grad=True: call "
            "model.requires_grad_(False) first, or freeze it alone with requires_grad_(False)"
        )
