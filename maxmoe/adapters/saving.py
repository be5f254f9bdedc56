"""Adapters of a parallelized model, in the format of the library that made them."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.adapters.stacked import factor_names, packed_as_by_peft

# In the paths of the parameters of adapters, those that are not active included.
_PARTS_OF_ADAPTERS = (".lora_", ".modules_to_save.")


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Collect the trained parameters and all adapters of a model on every rank, as PEFT saves them in one process.

    Buffers of the modules in PEFT's `modules_to_save`, such as the correction bias of a router, are among them.

    All ranks must call it. Load saved adapters with ``PeftModel.from_pretrained`` before `parallelize`, on any mesh::

        state_dict = maxmoe.parallel.adapter_state_dict(model)
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state_dict)

    Args:
        model: model of PEFT after `maxmoe.parallelize`.

    Returns:
        Whole tensors on the CPU, by the path of the parameter or buffer.
    """
    factors = factor_names(model)
    state_dict = {}
    for name, parameter in model.named_parameters():
        is_of_adapter = any(part in name for part in _PARTS_OF_ADAPTERS)
        if not parameter.requires_grad and not is_of_adapter:
            continue
        whole = parameter.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
        state_dict[name] = packed_as_by_peft(name, whole) if name in factors and whole.dim() == 3 else whole
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if ".modules_to_save." in name and name in persistent:
            state_dict[name] = buffer.detach().cpu()
    return state_dict
