"""Messages of errors."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def containing(*words: str) -> str:
    """A pattern of texts that contain all words, in any order."""
    return "".join(f"(?=.*{re.escape(word)})" for word in words)


def error_of(call: Callable[..., object], *arguments: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return str(caught.value)
