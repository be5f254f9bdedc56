"""Wrong arguments of every registered operator end in an error that names it, never in a crash or a wrong number."""

from support import hostile_calls
from support.run_ranks import run_alone


def test_hostile_calls() -> None:
    """In a fork, which may crash: the last line that it has printed names the call."""
    run_alone(hostile_calls.main, deadline=300)
