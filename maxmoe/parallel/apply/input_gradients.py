"""Check that an input of a parallelized module requires a gradient on all ranks or on none."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe._torch import never_compiled, tree_leaves
from maxmoe.ranks.named_collectives import all_gather
from maxmoe.recompute.selective import is_recomputation
from maxmoe.sharding.mesh import Mesh


class InputGradientCheck:
    """Forward pre-hook that raises if an input requires a gradient on some ranks only.

    The gradient of an input has collectives of its own. The ranks on which it is required would wait for the other
    ranks until the timeout. Without floating-point inputs, as in language models, the hook does not communicate,
    nor without gradients, as in evaluation, nor on a device, for which the host would have to wait.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._is_on_cpu = mesh.device_mesh.device_type == "cpu"
        self._signature = inspect.signature(module.forward)
        self._module_name = type(module).__name__  # FSDP replaces the class

    @never_compiled
    def enter(self, _module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Forward pre-hook: raise if the ranks differ."""
        if not self._is_on_cpu or is_recomputation() or not torch.is_grad_enabled():
            return
        named = self._signature.bind_partial(*arguments, **options).arguments
        leaves = [(name, leaf) for name, value in named.items() for leaf in tree_leaves(value)]
        floating = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not floating:
            return
        wanted = {name for name, leaf in floating if leaf.requires_grad}
        names = list(self._signature.parameters)
        mine = torch.tensor([name in wanted for name in names])
        of_ranks = mine.new_empty(dist.get_world_size() * len(names))
        all_gather(of_ranks, mine, "which inputs require a gradient")
        for name, of_input in zip(names, of_ranks.view(-1, len(names)).T.tolist(), strict=True):
            ranks = [rank for rank, requires_gradient in enumerate(of_input) if requires_gradient]
            if 0 < len(ranks) < len(of_input):
                raise ValueError(
                    f"{name} of {self._module_name} must require a gradient on all ranks or on none, "
                    f"got requires_grad=True on {len(ranks)} of {len(of_input)}: {', '.join(map(str, ranks))}"
                )
