"""Private names of the function transforms of torch (`torch.func`).

No public function tells whether a tensor is one of a transform.
"""

import torch
from torch import Tensor


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is one of `torch.func.vmap`, also inside of other transforms."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def hides_gradient(tensor: Tensor) -> bool:
    """Return whether `requires_grad` of a tensor is False because of `torch.func.vmap` or `jvp`.

    Their tensors wrap others, outside of the transform, which autograd differentiates.
    """
    if tensor.requires_grad or torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad
