"""Tables that read well as text and are Markdown."""

from typing import List, Optional, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, the first to the left and the others to the right."""
    lines: List[Sequence[str]] = [header, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        return f'| {" | ".join(cells)} |'

    rule = ['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])]
    return '\n'.join([text(header), text(rule), *(text(line) for line in rows)])


def number(value: Optional[float], digits: int = 3) -> str:
    """A value to some significant digits, without an exponent from 0.001 on; nothing for None."""
    if value is None:
        return ''
    whole = len(str(int(abs(value))))
    if abs(value) >= 1:
        return f'{value:,.{max(0, digits - whole)}f}'
    return f'{value:.{digits}g}'


def billions(count: float) -> str:
    """A count of multiply-adds in thousand millions."""
    return number(count / 1e9)
