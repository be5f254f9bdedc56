"""The parts of parameters, gradients and states that this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient, where this rank's part of the parameter is.

    Args:
        parameter: with a gradient.

    Returns:
        A plain tensor of the shape of the part of the parameter.

    Raises:
        ValueError: for sparse and complex gradients, and if only one of parameter and gradient is a DTensor.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} must be a {type(parameter).__name__} like "
            f"the parameter, got {type(gradient).__name__}"
        )
    if gradient.is_sparse or gradient.is_complex():
        raise ValueError(f"gradients must be dense and real, got {gradient.layout}, {gradient.dtype}")
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient
