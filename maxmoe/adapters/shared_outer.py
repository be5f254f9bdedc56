"""Low-rank factors that all experts of a layer share on the side of the hidden states: shared-outer adapters."""

from typing import Any, Literal

from torch import Tensor, nn

from maxmoe.adapters.peft import wrappers_of
from maxmoe.adapters.stacked import packed_as_by_peft, stacked_from_peft
from maxmoe.checks.early_optimizers import mark_replaced

# By this parameter, the experts write hidden states; by all others they read them.
_WRITER = "down_proj"


def share_outer_factors(model: nn.Module, adapter: str = "default") -> None:
    """Let all experts of a layer share the factors of an adapter of PEFT that read and write hidden states.

    W_e + scale * B_e A for gate and up, W_e + scale * B A_e for down: A of gate and up, and B of down, are one matrix
    for all experts of a layer. Its gradient is the sum over the experts. SGLang and vLLM read such adapters.

    Call it after the adapter has been added or loaded, and before the optimizer and `maxmoe.parallelize`. State dicts
    and files of PEFT have a copy for each expert: PEFT loads them, and this function finds the copies equal.

    Args:
        model: model of PEFT with adapters in `target_parameters` of experts.
        adapter: name of the adapter.

    Raises:
        ValueError: if the model has no such adapter, after `parallelize`, and if an adapter that is not new has
            different factors for the experts.

    Source: `--experts-shared-outer-loras` of SGLang, `--enable-moe-shared-loras` of vLLM.

    Example:
        >>> experts = ["experts.gate_up_proj", "experts.down_proj"]
        >>> model = get_peft_model(model, LoraConfig(r=8, target_parameters=experts))
        >>> maxmoe.adapters.share_outer_factors(model)
    """
    wrappers = {path: wrapper for path, wrapper in wrappers_of(model) if adapter in wrapper.lora_A}
    if not wrappers:
        raise ValueError(f"model must have the adapter {adapter!r} beside parameters of experts, got none")
    firsts = {path: _first(path, wrapper, adapter) for path, wrapper in wrappers.items()}
    for path, wrapper in wrappers.items():
        factor = _outer(wrapper)
        owner = getattr(wrapper, factor)[adapter]
        name = f"{path}.{factor}.{adapter}.weight"
        replaced, owner.weight = owner.weight, nn.Parameter(firsts[path], owner.weight.requires_grad)
        mark_replaced(replaced, name, after="share_outer_factors")
        wrapper.register_state_dict_post_hook(_with_copies)
        wrapper.register_load_state_dict_pre_hook(_without_copies)


def _outer(wrapper: Any) -> Literal["lora_A", "lora_B"]:
    """Return which factor of a wrapper has the hidden size."""
    return "lora_B" if wrapper.parameter_name == _WRITER else "lora_A"


def _first(path: str, wrapper: Any, adapter: str) -> Tensor:
    """Return the outer factor of the first expert as PEFT packs it, after checks that the others have no other one."""
    from maxmoe.adapters import _peft

    if _peft.is_stacked(wrapper):
        raise ValueError(f"{path}: share_outer_factors must be called before parallelize")
    lora_a, lora_b = _peft.stored_stacks(wrapper, adapter)
    stack = {"lora_A": lora_a, "lora_B": lora_b}[_outer(wrapper)].detach()
    if lora_b.any() and not stack.equal(stack[:1].expand_as(stack)):
        raise ValueError(
            f"{path}: the {len(stack)} experts of a trained adapter must have one {_outer(wrapper)} for "
            f"{wrapper.parameter_name}, got different ones"
        )
    return packed_as_by_peft(f"{path}.{_outer(wrapper)}.{adapter}.weight", stack[:1]).clone()


def _shared(wrapper: Any, prefix: str) -> dict[str, str]:
    """Return the adapter of each shared factor that is not a stack of a mesh, by its name in a state dict."""
    from maxmoe.adapters import _peft

    if _peft.is_stacked(wrapper):
        return {}
    return {
        f"{prefix}{_outer(wrapper)}.{adapter}.weight": adapter
        for adapter in wrapper.lora_A
        if len({*map(len, _peft.stored_stacks(wrapper, adapter))}) > 1
    }


def _with_copies(wrapper: Any, state_dict: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    """Give state dicts a copy of each shared factor for each expert."""
    for name, adapter in _shared(wrapper, prefix).items():
        stack = stacked_from_peft(_outer(wrapper), state_dict[name], wrapper.r[adapter])
        state_dict[name] = packed_as_by_peft(name, stack.expand(wrapper.num_experts, -1, -1))


def _without_copies(wrapper: Any, state_dict: dict[str, Tensor], prefix: str, _metadata: Any, *others: Any) -> None:
    """Take one of the copies of each shared factor, which must be equal."""
    *_, errors = others
    for name, adapter in _shared(wrapper, prefix).items():
        if name in state_dict:
            stack = stacked_from_peft(_outer(wrapper), state_dict[name], wrapper.r[adapter])
            if not stack.equal(stack[:1].expand_as(stack)):
                errors.append(f"{name} must be equal for all experts, which share it")
            state_dict[name] = packed_as_by_peft(name, stack[:1])
