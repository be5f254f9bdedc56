"""Text tables and paragraphs that fit the terminal, readable sizes, and progress bars."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

T = TypeVar("T")

GAP = 2  # spaces between columns
INDENT = 2  # spaces before the continuation lines of a row and of a cell
NUMBER = re.compile(r"[\d.,]+(e[+-]\d+)?( of [\d,]+| [A-Za-z]+|%)?")  # "1.50 GiB", "3 of 8"


def terminal_width() -> int | None:
    """Return the width of the terminal, or of the environment variable COLUMNS; None if there is neither."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def report(blocks: Iterable[str | Sequence[Sequence[str]]]) -> str:
    """Join texts and the rows of tables by empty lines, as wide as the terminal; lines with an indent are not wrapped.

    Columns of numbers are aligned to the right.
    """
    width = terminal_width()
    texts = []
    for block in blocks:
        if isinstance(block, str):
            lines = (line if line.startswith(" ") else paragraph(line, width=width) for line in block.split("\n"))
            texts.append("\n".join(lines))
        else:
            columns = enumerate(zip(*block[1:], strict=True))
            right = [index for index, cells in columns if index and any(cells) and all(map(_is_number, cells))]
            texts.append(text_table(block, right=right, width=width))
    return "\n\n".join(filter(None, texts))


def _is_number(cell: str) -> bool:
    return not cell or NUMBER.fullmatch(cell) is not None


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None) -> str:
    """Format rows as a table, the first row as heading with a rule below it; `right` lists right-aligned columns.

    A table wider than `width` has the first cell of each row on a line of its own, and wraps other cells. In a cell,
    `` | `` separates parts that are kept on one line if possible. Single words are never broken.
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
    """Wrap a line to `width` columns; None for no limit."""
    if width is None:
        return text
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def readable_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that gives at least one: "1.50 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 2 ** (10 * power):.2f} {units[power]}" if power else f"{count} B"


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _narrowed(widths: Sequence[int], rows: Sequence[Sequence[str]], total: int) -> list[int]:
    """Narrow the widest columns until the table fits, or every column is as narrow as its longest word."""
    narrowed = list(widths)
    least = _column_widths([[max(_wrap(cell, 0), key=len) for cell in row] for row in rows])
    while _total(narrowed) > total:
        wider = [index for index, size in enumerate(narrowed) if size > least[index]]
        if not wider:
            break
        narrowed[max(wider, key=lambda index: narrowed[index])] -= 1
    return narrowed


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[str]:
    """Align the cells of one row, on as many lines as its longest cell takes."""
    cells = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        (" " * GAP).join(
            part.rjust(width) if column in right else part.ljust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        )
        for parts in zip_longest(*cells, fillvalue="")
    ]


def _wrap(cell: str, width: int) -> list[str]:
    """Wrap a cell after its separators, and parts that are still too wide between words."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for part in re.split(r"(?<=\| )", cell):
        for word in [part] if INDENT + len(part.rstrip()) <= width else re.split(r"(?<= )", part):
            if lines[-1].strip() and len(lines[-1] + word.rstrip()) > width:
                lines.append(" " * INDENT)
            lines[-1] += word
    return [line.rstrip() for line in lines]


def listed(names: Sequence[str]) -> str:
    """Join the first three names, and the number of the others: "a, b, c, and 5 more"; "nothing" without names."""
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more]) or "nothing"


def ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers as ranges, such as "0-2,5"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def with_bar(steps: Iterable[T], **options: Any) -> Iterable[T]:
    """Return steps with a progress bar of tqdm, which takes the options; without tqdm, the steps alone."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, **options, dynamic_ncols=True)  # type: ignore[no-any-return]
