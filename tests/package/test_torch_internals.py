"""Private names of torch whose behaviour no other test shows, as `maxmoe/_torch/__init__.py` describes it."""

import torch
import torch.utils.checkpoint
from torch import nn

from maxmoe import _torch


def test_a_reshaped_tensor_is_no_view_and_keeps_its_hooks() -> None:
    x, calls = torch.ones(2, 3, requires_grad=True), []
    y = _torch.reshaped((2 * x).contiguous(), (6,))
    assert y.shape == (6,) and not y._is_view()
    y.register_hook(calls.append)
    y += 1
    y.sum().backward()
    assert len(calls) == 1 and x.grad is not None and x.grad.equal(torch.full((2, 3), 2.0))


def test_the_history_of_a_modified_view_is_that_of_its_base() -> None:
    calls: dict[str, int] = {}
    x = torch.ones(2, 3, requires_grad=True)
    base = 2 * x
    view = base.view(6)
    found = _torch.base_of_view(view)
    assert found is base and _torch.base_of_view(base) is None
    for name, tensor in (("view", view), ("base", found)):
        tensor.register_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    view += 1
    view.sum().backward()
    assert calls == {"base": 1}


def test_a_call_that_is_no_more_than_the_forward() -> None:
    module = nn.SiLU()
    assert _torch.are_called_plainly(module)
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)
        assert not _torch.are_called_plainly(module)
        handle.remove()
        assert _torch.are_called_plainly(module)
    module.forward = module.forward  # type: ignore[method-assign]
    assert not _torch.are_called_plainly(module)
    compiled = nn.SiLU()
    compiled.compile(backend="eager")
    assert not _torch.are_called_plainly(compiled)
