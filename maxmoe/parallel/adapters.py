"""Adapters of a parallelized model, in the format of the library that made them."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.adapters import factor_names, packed_as_by_peft


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Collect the trained parameters and all adapters of a model on every rank, as PEFT saves them in one process.

    All ranks must call it. Load saved adapters with ``PeftModel.from_pretrained`` before `parallelize`, on any mesh::

        state_dict = maxmoe.parallel.adapter_state_dict(model)
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state_dict)

    Args:
        model: model of PEFT after `maxmoe.parallelize`.

    Returns:
        Whole tensors on the CPU, by the path of the parameter.
    """
    factors = factor_names(model)
    state_dict = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in factors:
            continue
        whole = parameter.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
        state_dict[name] = packed_as_by_peft(name, whole) if name in factors and whole.dim() == 3 else whole
    return state_dict
