"""Writers of query results: a table, CSV or Arrow."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from branchlake_dagster.query.connection import is_number_type
from branchlake_dagster.wording import format_count, format_printable

if TYPE_CHECKING:
    from branchlake_dagster.query import QueryResult

_WIDE = 10_000
"""Width of a table, in characters, if the output is not a terminal: one line per row, for grep."""


def write_table(result: QueryResult, max_rows: int, output: Path | None) -> None:
    """Write at most `max_rows` rows (0: all) as a table to the file `output`; None is standard output.

    A line on standard error reports the number of rows, whether the result has more rows, and the state of
    the lake that was read.
    """
    grid = Table(show_edge=False, pad_edge=False)
    for name, kind in result.columns:
        grid.add_column(Text(name), justify="right" if is_number_type(kind) else "left", overflow="fold")
    row_count = 0
    has_more = False
    for row in _iter_text_rows(result):
        has_more = bool(max_rows) and row_count == max_rows
        if has_more:
            break
        grid.add_row(*(_build_cell(value) for value in row))
        row_count += 1
    with _open_text_file(output) as file:
        is_terminal = file is sys.stdout and file.isatty()
        console = Console(file=file) if is_terminal else Console(file=file, width=_WIDE)
        console.print(grid)
    rows = (
        f"Only {format_count(row_count, 'row')} of the result. To show all: --rows 0."
        if has_more
        else f"{format_count(row_count, 'row')}."
    )
    click.echo(f"{rows} Read at {result.state.label}.", err=True)


def _build_cell(value: str | None) -> Text:
    return Text("NULL", style="dim") if value is None else Text(format_printable(value))


def write_csv(result: QueryResult, output: Path | None) -> None:
    """Write all rows as CSV with a header (RFC 4180, UTF-8) to `output`; None is standard output.

    A null is written as an empty field, an empty string as `""`.
    """
    from pyarrow.csv import CSVWriter

    # DuckDB formats the values as text, because PyArrow's CSV writer supports neither lists nor structs.
    with (
        result.string_batches(numbers=True) as reader,
        _open_binary_file(output) as file,
        CSVWriter(file, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)


def write_arrow(result: QueryResult, output: Path | None) -> None:
    """Write all rows as Arrow IPC: a file that Feather readers accept, or a stream if `output` is None.

    Raises UsageError if the stream would go to a terminal.
    """
    import pyarrow as pa

    if output is None and sys.stdout.isatty():
        raise click.UsageError("Arrow is a binary format: name a file with --output, or use a pipe.")
    open_writer: Callable[..., Any] = pa.ipc.new_stream if output is None else pa.ipc.new_file
    with (
        result.batches() as reader,
        _open_binary_file(output) as file,
        open_writer(file, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)


def _iter_text_rows(result: QueryResult) -> Iterator[tuple[str | None, ...]]:
    with result.string_batches(1_000) as reader:
        for batch in reader:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class _UnclosedStream(io.RawIOBase):
    """A stream that stays open, because PyArrow's writers close the stream that they write to."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """Return True: the stream only supports writing."""
        return True

    def write(self, data: Any, /) -> int:
        """Write `data` to the underlying stream."""
        return self._stream.write(data)

    def close(self) -> None:
        """Flush the underlying stream and keep it open."""
        self._stream.flush()


@contextmanager
def _open_text_file(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def _open_binary_file(output: Path | None) -> Iterator[Any]:
    if output is None:
        yield _UnclosedStream(sys.stdout.buffer)
        return
    with output.open("wb") as file:
        yield file
