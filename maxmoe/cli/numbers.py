"""Numbers of the command line."""

import argparse
import re

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}


def positive(text: str) -> int:
    """Parse a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers."""
    return [positive(number) for number in text.split(",")]


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as 80GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 80GiB, got {text!r}")
    number = int(float(match[1]) * UNITS[match[2]])
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text!r}")
    return number
