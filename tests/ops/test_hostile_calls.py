"""Wrong arguments of every registered operator end in an error that names it, never in a crash or a wrong number."""

from support import hostile_calls
from support.call_in_fork import call_in_fork


def test_hostile_calls() -> None:
    """In a fork, which may crash: the last line that it has printed names the call."""
    call_in_fork(hostile_calls.main, seconds=300)
