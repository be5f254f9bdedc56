"""Private names of torch whose behaviour no other test shows, as `maxmoe/_torch/__init__.py` describes it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import maxmoe
from maxmoe import _torch
from maxmoe._torch import autograd


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


def test_a_running_backward_is_seen() -> None:
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(autograd.is_backward_running()))
    assert not autograd.is_backward_running()
    x.sum().backward()
    assert seen == [True] and not autograd.is_backward_running()


@pytest.mark.parametrize("context_fn", [None, maxmoe.keep_routing])
def test_checkpoints_are_recognized(context_fn: Callable[[], Any] | None) -> None:
    seen: list[tuple[bool, list[object], int]] = []

    def block(x: Tensor) -> Tensor:
        is_packed = autograd.is_packed_by_checkpoint()
        with torch.autograd.graph.save_on_cpu():
            seen.append((is_packed, autograd.checkpoint_frames(), autograd.backward_id()))
        return x.sin()

    options = {} if context_fn is None else {"context_fn": context_fn}
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, **options).backward()
    (packed, (frame,), number), (_, (frame_again,), number_again) = seen
    assert packed and frame is frame_again and number == -1 != number_again
    assert not autograd.is_packed_by_checkpoint() and not autograd.checkpoint_frames()
    weak = weakref.ref(frame)
    del frame, frame_again
    seen.clear()
    gc.collect()
    assert weak() is None


def test_a_weak_storage_ends_with_the_last_tensor_that_shares_it() -> None:
    tensor = torch.ones(4)
    view, storage = tensor[1:], _torch.WeakStorage(tensor)
    del tensor
    assert storage.get() is not None
    del view
    gc.collect()
    assert storage.get() is None


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


def test_versions_count_modifications_in_place() -> None:
    tensor = torch.ones(2)
    before = _torch.version_of(tensor)
    tensor[:1].add_(1)
    assert _torch.version_of(tensor) == _torch.version_of(tensor.detach()) == before + 1


def test_the_actions_of_a_schedule_need_no_process_groups() -> None:
    from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleLoopedBFS

    first, second = _torch.schedule_actions(ScheduleLoopedBFS, [0, 2], 2, 1)
    assert first == [("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("B", 0, 0)]
    assert second == [("F", 1, 0), ("F", 3, 0), ("B", 3, 0), ("B", 1, 0)]
    # A forward and a backward that overlap are two actions.
    (actions,) = _torch.schedule_actions(ScheduleDualPipeV, [0, 1], 1, 2)
    assert {letter for letter, _, _ in actions} <= set("FBIW")
    assert sum(letter == "F" for letter, _, _ in actions) == 4
