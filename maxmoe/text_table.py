"""Text tables and paragraphs as wide as the terminal, and readable sizes."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

GAP = 2  # spaces between columns
INDENT = 2  # of the further lines of a row, and of a cell


def terminal_width() -> int | None:
    """Return the columns of the terminal, or what COLUMNS says in the environment; None if there is neither."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None) -> str:
    """Align the cells of each column.

    A table that would be wider than it may be has the first cell of every row, its name, on a line of its own, and
    other cells on several lines where they must be.

    Args:
        rows: the first one is the heading. In a cell, `` | `` separates parts that are kept together if possible.
        right: the columns that are aligned on the right, of those after the first one.
        width: columns of the whole, None for any number. Only where single words need more, it becomes wider.

    Returns:
        The rows, and a rule below the heading.
    """
    names, others = [row[0] for row in rows], [row[1:] for row in rows]
    indent = max(map(len, names)) + GAP
    widths = _column_widths(others)
    is_wide = False
    if width is not None and indent + _total(widths) > width:
        is_wide, indent = True, INDENT
        widths = _narrowed(widths, others, width - indent)
    blocks = []
    for name, row in zip(names, others, strict=True):
        lines = [" " * indent + line for line in _lines(row, widths, [column - 1 for column in right])]
        first = [name] if is_wide else [name.ljust(indent) + lines.pop(0)[indent:]]
        blocks.append([line.rstrip() for line in (*first, *lines)])
    rule = "-" * max(len(line) for block in blocks for line in block)
    return "\n".join([*blocks[0], rule, *(line for block in blocks[1:] for line in block)])


def paragraph(text: str, *, width: int | None) -> str:
    """Break a line that is wider than it may be.

    Args:
        text: one line.
        width: columns, None for any number.

    Returns:
        The lines.
    """
    if width is None:
        return text
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def readable_bytes(count: int) -> str:
    """Write a number of bytes in the largest unit of which there is at least one: "1.50 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 2 ** (10 * power):.2f} {units[power]}" if power else f"{count} B"


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _narrowed(widths: Sequence[int], rows: Sequence[Sequence[str]], total: int) -> list[int]:
    """Narrow the widest columns until all fit, or each is as wide as its longest word."""
    narrowed = list(widths)
    least = _column_widths([[max(_wrap(cell, 0), key=len) for cell in row] for row in rows])
    while _total(narrowed) > total:
        wider = [index for index, size in enumerate(narrowed) if size > least[index]]
        if not wider:
            break
        narrowed[max(wider, key=lambda index: narrowed[index])] -= 1
    return narrowed


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[str]:
    """Align the cells of one row, on as many lines as the longest of them."""
    cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        (" " * GAP).join(
            part.rjust(width) if column in right else part.ljust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        )
        for parts in zip_longest(*cells, fillvalue="")
    ]


def _wrap(cell: str, width: int) -> list[str]:
    """Break a cell after its separators; parts that are wider yet, between words."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for part in re.split(r"(?<=\| )", cell):
        for word in [part] if INDENT + len(part.rstrip()) <= width else re.split(r"(?<= )", part):
            if lines[-1].strip() and len(lines[-1] + word.rstrip()) > width:
                lines.append(" " * INDENT)
            lines[-1] += word
    return [line.rstrip() for line in lines]
