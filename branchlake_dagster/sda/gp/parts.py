"""Divide the text of a GP file into parts whose records can be parsed independently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from branchlake_dagster.sda.gp.read import GpFormat

PART_CHARS = 1 << 20
"""The usual length of a part. A catalog of 16,000 objects as TLE has three parts."""
_BLANK = " \t\x00\x1a"
_MIN_ELEMENT_LINE_CHARS = 25
_KVN_MESSAGE_START = re.compile(r"[ \t]*CCSDS_OMM_VERS[ \t]*=", re.IGNORECASE | re.ASCII)
"""Matches only lines that `from_kvn` regards as the start of a message, although not all of them."""

Cut = Callable[[str, int], int | None]


class FilePart(NamedTuple):
    """A part of a file's text, and the number of its first line in the file."""

    text: str
    first_line: int


def divide_text(file_text: str, file_format: GpFormat, part_chars: int = PART_CHARS) -> list[FilePart]:
    """Divide a file's text so that the records of all parts are the records of the file.

    TLE is divided after a line 2, CSV after any line, and KVN before a message. Each part of a CSV file
    begins with the header. JSON and XML are not divided: only a parser knows where their records end.

    Args:
        file_text: The text, with line ends as `decode_gp_file` returns them.
        file_format: The format.
        part_chars: The usual length of a part.
    """
    match file_format:
        case GpFormat.TLE:
            return list(_divide(file_text, _after_line_2, part_chars, 0))
        case GpFormat.CSV:
            return _divide_csv(file_text, part_chars)
        case GpFormat.KVN:
            # A part without a message would be an error, so the first part has the first message.
            first_message = _before_message(file_text, 0)
            begin = len(file_text) if first_message is None else first_message + 1
            return list(_divide(file_text, _before_message, part_chars, begin))
        case GpFormat.JSON | GpFormat.XML:
            return [FilePart(file_text, 1)]


def _divide(file_text: str, next_cut: Cut, part_chars: int, min_cut: int) -> Iterator[FilePart]:
    begin, first_line = 0, 1
    while begin < len(file_text):
        at = max(begin + part_chars, min_cut)
        cut = next_cut(file_text, at) if at < len(file_text) else None
        end = len(file_text) if cut is None else cut
        yield FilePart(file_text[begin:end], first_line)
        first_line += file_text.count("\n", begin, end)
        begin = end
    if not file_text:
        yield FilePart("", 1)


def _divide_csv(file_text: str, part_chars: int) -> list[FilePart]:
    header = next((line for _, line in _lines_from(file_text, 0) if line.rstrip(_BLANK)), "")
    first, *others = _divide(file_text, _after_line, part_chars, file_text.find(header) + len(header) + 1)
    # With the header before it, the text of a part begins a line earlier.
    return [first, *(FilePart(f"{header}\n{text}", first_line - 1) for text, first_line in others)]


def _lines_from(file_text: str, at: int) -> Iterator[tuple[int, str]]:
    """Return the begin and the text of each line that begins at `at` or later."""
    begin = at if at == 0 or file_text[at - 1] == "\n" else file_text.find("\n", at) + 1
    while begin < len(file_text) and (begin or at == 0):
        end = file_text.find("\n", begin)
        yield begin, file_text[begin : end if end >= 0 else len(file_text)]
        if end < 0:
            return
        begin = end + 1


def _after_line(file_text: str, at: int) -> int | None:
    return next((begin for begin, _ in _lines_from(file_text, at)), None)


def _before_message(file_text: str, at: int) -> int | None:
    return next((begin for begin, line in _lines_from(file_text, at) if _KVN_MESSAGE_START.match(line)), None)


def _after_line_2(file_text: str, at: int) -> int | None:
    """Return the end of the next line that `pair_lines` regards as a line 2.

    A line 2 belongs to the line before it, so no pair and no name spans this place.
    """
    for begin, line in _lines_from(file_text, at):
        stripped_line = line.rstrip(_BLANK)
        if stripped_line.startswith("2 ") and len(stripped_line) >= _MIN_ELEMENT_LINE_CHARS:
            return begin + len(line) + 1
    return None
