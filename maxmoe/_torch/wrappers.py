"""Names under which modules of torch hold the module that they wrap."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Of torch.compile, FSDP1 and checkpoint_wrapper.
WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped_path(model: nn.Module, path: str) -> str:
    """Return the path of a submodule without the names that wrappers around it or around its parents add."""
    names = []
    for name in path.split("."):
        # The name of DDP is an ordinary one, which models use too.
        is_ddp = name == "module" and isinstance(model, DataParallel | DistributedDataParallel)
        if not is_ddp and name not in WRAPPED_NAMES:
            names.append(name)
        model = model.get_submodule(name)
    return ".".join(names)
