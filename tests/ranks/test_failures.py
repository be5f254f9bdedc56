"""A rank that dies, hangs or raises: the others name it, in every strategy, in the forward and in the backward."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.parallel import RankError, watch_ranks
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.ranks.failures import STORE_IS_GONE, Watch, first_line, is_lost_connection
from maxmoe.sharding import Mesh
from ranks.failing_ranks import (
    ENOUGH,
    FAILURES,
    PATIENCE,
    SLACK,
    TIMEOUT,
    check_rank_2_is_named,
    complain,
    hang,
    outcomes,
    patience_with,
)
from support.parallel_decoder import MeshRules
from support.run_ranks import check_at_once, run_ranks

# Every strategy, failure and direction once.
CASES: list[Any] = [
    (MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}), "ring_of_experts", "forward", *FAILURES[2]),
    (MeshRules("ep-as-dp", {"expert": 4}), "ragged_all_to_all", "backward", *FAILURES[0]),
    (MeshRules("ep-tp", {"data": 2, "expert": 2}), "auto", "backward", *FAILURES[1]),
]


def test_the_others_name_the_rank(tmp_path: Path) -> None:
    """Rank 2 fails between the dispatch of the tokens and their return, or of their gradients."""

    def check(
        layout: MeshRules, dispatch: Dispatch, where: str, fail: Callable[[], None], delay: float, message: str
    ) -> None:
        def hook(_module: object, _arguments: object, outputs: Tensor) -> None:
            fail() if where == "forward" else outputs.register_hook(lambda _: fail())

        def train() -> None:
            mesh = Mesh(layout.sizes, timeout=timedelta(seconds=TIMEOUT))
            config = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2)
            layer = parallelize(MoE(config), mesh, layout.rules, dispatch=dispatch)
            for step in range(3):
                if step == 1 and dist.get_rank() == 2:
                    layer.experts.register_forward_hook(hook)
                output = layer(torch.randn(1, 6, 8, requires_grad=True))
                (output.hidden_states.sum() + output.aux_loss).backward()

        folder = tmp_path / fail.__name__
        folder.mkdir()
        check_rank_2_is_named(outcomes(folder, train, patience=patience_with(fail)), fail, delay, message)

    check_at_once(check, CASES)


def test_what_ends_with_a_timeout(tmp_path: Path) -> None:
    def run(check: Callable[[Path], None]) -> None:
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(folder)

    check_at_once(run, [(stops_too_early,), (wait_for_each_other,), (is_at_work_when_another_fails,)])


def stops_too_early(folder: Path) -> None:
    def train() -> None:
        for _ in range(1 if dist.get_rank() == 1 else 2):
            dist.all_reduce(torch.ones(2))

    ((_, message),) = outcomes(folder, train, 2, TIMEOUT).values()
    assert message.startswith("RankError: rank 1 of 2 came to the end before the others (rank 0 saw: ")


def wait_for_each_other(_folder: Path) -> None:
    def train() -> tuple[int, str]:
        groups = [dist.new_group(timeout=timedelta(seconds=TIMEOUT)) for _ in range(2)]
        try:
            with watch_ranks(PATIENCE):
                line = sys._getframe().f_lineno + 1
                dist.all_reduce(torch.ones(2), group=groups[dist.get_rank()])
        except RankError as error:
            return line, str(error)
        raise AssertionError("the collectives of two groups have met")

    for line, message in run_ranks(train, 2, timeout=ENOUGH):
        places = "; ".join(f"rank {rank} at {__file__}:{line} in train" for rank in range(2))
        assert message.startswith(f"no rank of 2 failed first: all waited until the timeout. {places}. Did one skip a ")


def is_at_work_when_another_fails(folder: Path) -> None:
    """Rank 0 sleeps and calls no collective: it ends because rank 1 fails."""

    def train() -> None:
        os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        dist.barrier()
        hang() if dist.get_rank() == 0 else complain()

    assert outcomes(folder, train, 2).keys() == {1}
    assert (folder / "stderr").read_text() == "RankError: rank 1 of 2 failed first: ValueError: no such token\n"


def wait() -> None:
    dist.all_reduce(torch.ones(2))


def finish() -> None:
    pass


def group_with_store_on_rank_0() -> int:
    """Replace the default group of two ranks; return the process id of rank 0."""
    files, is_host = dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    if is_host:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        files.set("host", f"{store.port} {os.getpid()}")
    port, host = map(int, files.get("host").split())
    if not is_host:
        store = dist.TCPStore("localhost", port)
    dist.destroy_process_group()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=int(not is_host), world_size=2, timeout=timeout)
    return host


NO_ANSWER = (
    rf"RankError: the process with the store of torch\.distributed sends no heartbeat for {PATIENCE:g} s: rank 0 "
)


LAST_CALLS = [
    (wait, TIMEOUT, NO_ANSWER + r"\(rank 1 saw: .*\)"),
    (complain, 0.0, "ValueError: no such token"),
    (finish, 0.0, ""),
]


def test_the_process_with_the_store_is_stopped(tmp_path: Path) -> None:
    """The sockets of a stopped rank stay open: connections are not lost, but it does not answer."""

    def check(last: Callable[[], None], delay: float, message: str, is_stopped_early: bool) -> None:
        path = tmp_path / f"{last.__name__} {is_stopped_early}"

        def train() -> None:
            host, found = group_with_store_on_rank_0(), ""
            dist.barrier()
            if dist.get_rank() == 0:
                with watch_ranks(PATIENCE):
                    hang()
            if is_stopped_early:
                os.kill(host, signal.SIGSTOP)
            begin = time.monotonic()
            try:
                with watch_ranks(PATIENCE):
                    time.sleep(PATIENCE / 5)  # some heartbeats
                    os.kill(host, signal.SIGSTOP)
                    last()
            except (RankError, ValueError) as error:
                found = f"{type(error).__name__}: {error}"
            path.write_text(f"{time.monotonic() - begin} {found}")
            os.kill(host, signal.SIGKILL)

        with pytest.raises(RuntimeError, match="rank 0 of 2 failed first:\nit died"):
            run_ranks(train, 2, deadline=ENOUGH)
        seconds, _, text = path.read_text().partition(" ")
        assert re.fullmatch(message, text)
        assert float(seconds) < delay + PATIENCE + SLACK

    check_at_once(check, [(*last_call, early) for last_call in LAST_CALLS for early in (False, True)])


def test_an_error_of_all_ranks_stays_what_it_is(tmp_path: Path) -> None:
    assert {message for _, message in outcomes(tmp_path, complain).values()} == {"ValueError: no such token"}


def test_what_is_a_lost_connection() -> None:
    lost = RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4")
    wrapped = ValueError("cannot write the checkpoint")
    wrapped.__cause__ = lost
    assert (
        is_lost_connection(lost) and is_lost_connection(wrapped) and is_lost_connection(dist.DistBackendError("NCCL"))
    )
    assert not is_lost_connection(RuntimeError("shapes cannot be multiplied")) and not is_lost_connection(KeyError("x"))
    assert first_line(lost) == "Connection closed by peer [::1]:4"
    assert (first_line(RuntimeError("[a] b\nc")), first_line(RuntimeError())) == ("[a] b", "RuntimeError")


def test_the_process_with_the_store_is_gone() -> None:
    def gone(*arguments: object) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def check() -> list[bool]:
        found = []
        for name, arguments in (("leave", ()), ("find_failure", ("here",)), ("report", ([0], "died"))):
            watch = Watch(PATIENCE)
            watch.start()
            while watch.answered_at < 0:  # not connected
                time.sleep(0.01)
            with patch.multiple(dist.PrefixStore, set=gone, check=gone, compare_set=gone):
                found.append(watch.finish(partial(getattr(watch, name), *arguments)) == STORE_IS_GONE)
        return found

    assert run_ranks(check, 1) == [[True] * 3]
