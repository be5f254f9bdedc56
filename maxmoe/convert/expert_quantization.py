"""Quantization of the experts of a model in place."""

from collections import Counter

from torch import Tensor, nn

from maxmoe.adapters import connect_if_installed, wrappers_of
from maxmoe.declaration import expert_matrices
from maxmoe.quantization import QuantizedStack, QuantizedWeight, put_stack, quantize


def quantize_experts(model: nn.Module, format: str, *, group_size: int | None = None) -> None:
    """Quantize the frozen experts of a model in place.

    The weights of the routed experts of `maxmoe.MoE`, and of models of transformers with
    ``experts_implementation="maxmoe"``, become `maxmoe.quantization.QuantizedWeight`, whose codes and scales are
    parameters. Biases, routers, shared experts and all other parameters are left as they are. Adapters of PEFT may be
    added before or after; PEFT is imported if it is installed, so that it finds the weights by their names.

    Each parameter is freed as soon as it has been quantized, one expert after the other. The peak memory is that of the
    model and the largest quantized parameter.

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
        (path, module, matrices)
        for path, module in model.named_modules()
        for matrices in expert_matrices(module).items()
    ]
    if not found:
        raise ValueError(
            "the model must have experts that maxmoe computes, got none: a model of transformers needs "
            'experts_implementation="maxmoe" and import maxmoe.integrations.transformers'
        )
    for path, module, (name, _) in found:
        _check(f"{path}.{name}".removeprefix("."), getattr(module, name))
    _check_unmerged(model)
    connect_if_installed()
    num_users = Counter(id(module.get_parameter(name)) for _, module, (name, _) in found)
    shared: dict[tuple[nn.Parameter, bool], QuantizedWeight] = {}
    for path, module, (name, is_first_in) in found:
        parameter = module.get_parameter(name)
        quantized = shared.get((parameter, is_first_in))
        if quantized is None:
            try:
                stack = quantize(parameter if is_first_in else parameter.mT, format, group_size)
            except ValueError as error:
                raise ValueError(f"{path}.{name}".removeprefix(".") + f": {error}") from error
            quantized = QuantizedWeight(stack if is_first_in else stack.mT)
        # Only a tied parameter is kept, because keeping one keeps its memory.
        if num_users[id(parameter)] > 1:
            shared[parameter, is_first_in] = quantized
        put_stack(module, name, quantized)
        del parameter  # otherwise it would be held while the next one is quantized


def _check_unmerged(model: nn.Module) -> None:
    """Raise for adapters that are merged into the weights, because PEFT could not subtract them again."""
    for path, wrapper in wrappers_of(model):
        if wrapper.merged_adapters:
            raise ValueError(
                f"{path} must have no merged adapters, got {list(wrapper.merged_adapters)}: call merge_and_unload or "
                "unmerge_adapter before quantize_experts"
            )


def _check(name: str, parameter: Tensor | QuantizedStack) -> None:
    if isinstance(parameter, QuantizedStack):
        raise ValueError(f"{name} must not be quantized yet, got {parameter.format}")
    if parameter.requires_grad:
        raise ValueError(
            f"{name} must be frozen, because quantized weights have no gradient, got requires_grad=True: call "
            "model.requires_grad_(False) first, or freeze it alone with requires_grad_(False)"
        )
    if type(parameter) is not nn.Parameter:
        raise ValueError(
            f"{name} must be an ordinary parameter, got {type(parameter).__name__}: quantize before parallelize"
        )
