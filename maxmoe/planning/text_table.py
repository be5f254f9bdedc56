"""Text tables and readable sizes."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Align the cells of each column.

    Args:
        rows: the first one is the heading.
        right: the columns that are aligned on the right.

    Returns:
        One line per row, and a rule below the heading.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def readable_bytes(count: int) -> str:
    """Write a number of bytes in the largest unit of which there is at least one: "1.50 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 2 ** (10 * power):.2f} {units[power]}" if power else f"{count} B"
