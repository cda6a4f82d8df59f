"""A query's result for people, for spreadsheets and for programs."""

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
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from branchlake_dagster.query import QueryResult

_WIDE = 10_000
"""Columns when nobody watches: a line per row, for grep."""


def write_table(result: QueryResult, max_rows: int, output: Path | None) -> None:
    """At most `max_rows` rows (0: all) with a line that says what was read and whether there are more."""
    grid = Table(show_edge=False, pad_edge=False)
    for name, kind in result.columns:
        grid.add_column(Text(name), justify="right" if is_number_type(kind) else "left", overflow="fold")
    row_count = 0
    has_more = False
    for row in _iter_text_rows(result):
        has_more = bool(max_rows) and row_count == max_rows
        if has_more:
            break
        grid.add_row(*(Text("NULL", style="dim") if value is None else Text(value) for value in row))
        row_count += 1
    with _open_text_file(output) as file:
        is_terminal = file is sys.stdout and file.isatty()
        console = Console(file=file) if is_terminal else Console(file=file, width=_WIDE)
        console.print(grid)
    rows = (
        f"The first {row_count:,} rows; --rows 0 shows all."
        if has_more
        else f"{format_count(row_count, 'row')}."
    )
    click.echo(f"{rows} Read at {result.state.label}.", err=True)


def write_csv(result: QueryResult, output: Path | None) -> None:
    """All rows as CSV (RFC 4180, UTF-8) with a header; a null is empty, an empty text `""`."""
    from pyarrow.csv import CSVWriter

    # DuckDB's texts: PyArrow's writer takes no lists and no structs.
    with (
        result.string_batches(numbers=True) as reader,
        _open_binary_file(output) as file,
        CSVWriter(file, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)


def write_arrow(result: QueryResult, output: Path | None) -> None:
    """All rows as Arrow IPC: a file (which Feather readers take) with `output`, else a stream."""
    import pyarrow as pa

    if output is None and sys.stdout.isatty():
        raise click.UsageError("Arrow is binary: name a file with --output, or send it on through a pipe.")
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
    """A stream that whoever writes to it leaves open: PyArrow's writers close what they are given."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """It is there to be written to."""
        return True

    def write(self, data: Any, /) -> int:
        """Pass `data` on."""
        return self._stream.write(data)

    def close(self) -> None:
        """Pass on what is not written yet, and stay open."""
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
