"""Each private name of torch works as `maxmoe/_torch/__init__.py` says, in the installed version of torch."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import maxmoe
from maxmoe import _torch
from maxmoe._torch import autograd
from maxmoe.sharding import Mesh
from support.run_ranks import fake_rank, run_ranks


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_a_registered_named_tuple_is_exported() -> None:
    _torch.register_namedtuple(Pair, "maxmoe.tests.Pair")

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Pair:
            return Pair(x, 2 * x)

    program = torch.export.export(Module(), (torch.ones(2),))
    assert isinstance(program.module()(torch.ones(2)), Pair)


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


def test_frames_of_nested_checkpoints() -> None:
    seen: list[list[object]] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(autograd.checkpoint_frames())
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sin()

    torch.utils.checkpoint.checkpoint(outer, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    (innermost, outermost), (new, outermost_again), (innermost_again,) = seen
    assert outermost is outermost_again and innermost is innermost_again and new is not innermost


def test_reentrant_checkpoints_are_recognized() -> None:
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(autograd.is_reentrant_checkpoint())
        return x.sin()

    torch.utils.checkpoint.checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=True).backward()
    torch.utils.checkpoint.checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [True, True, False] and not autograd.is_reentrant_checkpoint()


def test_a_weak_storage_ends_with_the_last_tensor_that_shares_it() -> None:
    tensor = torch.ones(4)
    view, storage = tensor[1:], _torch.WeakStorage(tensor)
    del tensor
    assert storage.get() is not None
    del view
    gc.collect()
    assert storage.get() is None


def test_a_tensor_in_the_place_of_a_parameter_is_part_of_the_graph() -> None:
    linear, scale = nn.Linear(2, 2), torch.ones((), requires_grad=True)
    parameter = _torch.parameter_table(linear)["weight"]
    assert parameter is linear.weight
    _torch.parameter_table(linear)["weight"] = scale * linear.weight
    linear(torch.ones(1, 2)).sum().backward()
    _torch.parameter_table(linear)["weight"] = parameter
    assert scale.grad is not None and linear.weight is parameter and next(iter(linear.parameters())) is parameter


def test_a_converted_module_restores_what_it_wants() -> None:
    class Wide(_torch.ConvertedModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wide", torch.full((1,), 1 / 3))
            self.register_buffer("narrow", torch.ones(1))

        def before_conversion(self) -> Callable[[], None]:
            before = self.wide

            def restore() -> None:
                self.wide = before

            return restore

    module = nn.Sequential(Wide()).to(torch.bfloat16)
    assert module[0].wide.dtype == torch.float32 and module[0].narrow.dtype == torch.bfloat16


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


def test_tracing_is_seen() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_traced())
        return x + 1

    function(torch.ones(2))
    deprecation = (DeprecationWarning, FutureWarning)  # from torch 2.15 on the second
    with pytest.warns(deprecation, match="`torch.jit.trace` is deprecated"):
        torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen == [False, True]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_tensor_becomes_a_parameter(requires_grad: bool) -> None:
    with fake_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(2, 3), Mesh({"fsdp": 2}).device_mesh, [Shard(0)], run_check=False)
        parameter = _torch.as_parameter(tensor, requires_grad=requires_grad)
        assert parameter is tensor and parameter.requires_grad == requires_grad and parameter.is_leaf
        module = nn.Module()
        module.weight = parameter
        assert [*module.parameters()] == [parameter]
        assert isinstance(copy.deepcopy(module).weight, nn.Parameter)


def test_names_of_arguments() -> None:
    assert _torch.argument_names(torch.ops.aten.add.Tensor) == ["self", "other", "alpha"]


def test_versions_count_modifications_in_place() -> None:
    tensor = torch.ones(2)
    before = _torch.version_of(tensor)
    tensor[:1].add_(1)
    assert _torch.version_of(tensor) == _torch.version_of(tensor.detach()) == before + 1


def test_stores_groups_and_placements_of_ranks() -> None:
    def check() -> None:
        _torch.default_store().set("key", "value")
        assert _torch.default_store().get("key") == b"value"
        group = dist.new_group(range(4))
        assert _torch.process_group_named(group.group_name) is group
        mesh = Mesh({"outer": 2, "inner": 2}).device_mesh
        whole = torch.arange(4.0)
        # `outer` splits what `inner` has split: rank (o, i) holds element 2 i + o.
        part = whole[2 * (dist.get_rank() % 2) + dist.get_rank() // 2].view(1)
        placements = [_torch.strided_shard(0, 2), Shard(0)]
        tensor = DTensor.from_local(part, mesh, placements, run_check=False)
        assert tensor.full_tensor().equal(whole)

    run_ranks(check, 4)


def test_the_actions_of_a_schedule_need_no_process_groups() -> None:
    from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleLoopedBFS

    first, second = _torch.schedule_actions(ScheduleLoopedBFS, [0, 2], 2, 1)
    assert first == [("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("B", 0, 0)]
    assert second == [("F", 1, 0), ("F", 3, 0), ("B", 3, 0), ("B", 1, 0)]
    # A forward and a backward that overlap are two actions.
    (actions,) = _torch.schedule_actions(ScheduleDualPipeV, [0, 1], 1, 2)
    assert {letter for letter, _, _ in actions} <= set("FBIW")
    assert sum(letter == "F" for letter, _, _ in actions) == 4


def test_transforms_hide_that_a_gradient_is_required() -> None:
    seen, batched = [], []

    def look(x: Tensor) -> Tensor:
        seen.append((autograd.hides_gradient(x), autograd.hides_gradient(torch.ones(()))))
        batched.append(autograd.is_batched(x))
        return x

    x = torch.ones(1, 1, 2)
    for requires_grad in (True, False):
        y = x.clone().requires_grad_(requires_grad)
        torch.func.vmap(look)(y)
        torch.func.vmap(torch.func.vmap(look))(y)
        torch.func.jvp(look, (y,), (x,))
        look(y)
    torch.func.vmap(lambda y: torch.func.jvp(look, (y,), (y,)))(x)
    assert seen == [(True, False)] * 3 + [(False, False)] * 6
    assert batched == [True, True, False, False] * 2 + [True]
