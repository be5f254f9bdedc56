"""Patterns for the messages of errors."""

import re


def containing(*words: str) -> str:
    """A pattern of texts that contain all words, in any order."""
    return "".join(f"(?=.*{re.escape(word)})" for word in words)
