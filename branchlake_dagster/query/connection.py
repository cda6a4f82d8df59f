"""Connecting to a lake that runs, and asking it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self, TypeVar

from pyiceberg.table import Table

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.lakehouse.sql_names import quoted, sql_name
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.query.dataset import IcebergDataset
from branchlake_dagster.query.names import Path, named_tables, resolve, table_keys
from branchlake_dagster.query.reference import QueryFailed, Where
from branchlake_dagster.settings import Settings

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

_RESERVED = ("system", "temp", "information_schema", "pg_catalog")
_BATCH = 65_536
_NUMBER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL\(.*\)|BOOLEAN")
T = TypeVar("T")


def connect(settings: Settings | None = None) -> LakeReader:
    """Connects to a lake for reading. Starts no server and makes no folder.

    Args:
        settings (Optional[Settings]): Where the lake is. (default: the environment's `BRANCHLAKE_…`)

    Returns:
        LakeReader: Answers SQL and gives tables, at `main`, a branch, a run or a moment.

    Raises:
        LakeNotRunning: With the command that starts it: the lake's embedded Nessie is down, or there is no
            lake in the state folder.

    Examples:
        .. code-block:: python

            from branchlake_dagster import connect

            lake = connect()
            rows = lake.sql("SELECT * FROM shop.prices", run="a8960950").polars()
    """
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    return LakeReader(lake)


class LakeReader:
    """Reads a lake at `main`, a branch, a run or a moment. What it gives stays readable after it."""

    def __init__(self, lake: Lakehouse) -> None:
        self._lake = lake

    def sql(
        self,
        query: str,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> QueryResult:
        """The result of one query in DuckDB's SQL; nothing is computed before it is asked for.

        Tables are written `namespace.table`, with quotes where a name needs them, and the inner levels of a
        deep namespace as one: `a."b.c".t`. All are read at one commit. `branch`, `run` and `at`: see `where`.
        Raises QueryFailed, TableNotThere, NoSuchState.
        """
        place = self.where(branch=branch, run=run, at=at)
        connection = _duckdb()
        try:
            named = named_tables(connection, query)
            keys = resolve(self._lake.nessie, place, [path for path in named if len(path) > 1])
            catalog = self._lake.catalog(place.ref)
            _attach(connection, {path: catalog.load_table(key.elements) for path, key in keys.items()})
            try:
                relation = _asked(lambda: connection.sql(query))
            except QueryFailed as failed:
                failed.hint = self._namespaces(named, place)
                raise
            return QueryResult(relation, connection, place)
        except BaseException:
            connection.close()
            raise

    def table(
        self,
        name: str,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> Table:
        """A table for PyIceberg: `.scan(…)`, `.to_polars()`, `.inspect`. It is at a fixed commit: read-only.

        `name` is dotted; an element with dots in it stands in backticks. Raises NoSuchTableError.
        """
        place = self.where(branch=branch, run=run, at=at)
        return self._lake.catalog(place.ref).load_table(ContentKey.from_path(name).elements)

    def polars(
        self,
        name: str,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> pl.LazyFrame:
        """A table for Polars, lazily. The settings' S3 keys and endpoint go with it; `name` as in `table`."""
        import polars

        if find_spec("polars_iceberg") is None:
            # Polars plans through PyIceberg then; said so beforehand, it does not warn that it does.
            os.environ.setdefault("POLARS_ICEBERG_PLANNER", "pyiceberg")
        properties = self._lake.settings.file_io_properties()
        options = {name: value for name, value in properties.items() if name.startswith("s3.")}
        return polars.scan_iceberg(
            self.table(name, branch=branch, run=run, at=at), storage_options=options or None
        )

    def tables(
        self, *, branch: str | None = None, run: str | None = None, at: str | datetime | None = None
    ) -> list[str]:
        """The names of all tables, as a query writes them."""
        keys = table_keys(self._lake.nessie, self.where(branch=branch, run=run, at=at))
        return [sql_name(key) for key in keys]

    def _namespaces(self, named: Iterable[Path], place: Where) -> str | None:
        """What to write for a table that a failed query names without its namespace, if it is in the lake."""
        alone = {path[0].lower() for path in named if len(path) == 1}
        every = table_keys(self._lake.nessie, place) if alone else []
        keys = [key for key in every if key[-1].lower() in alone]
        return f"Name the table with its namespace: {', '.join(map(sql_name, keys))}." if keys else None

    def where(
        self, *, branch: str | None = None, run: str | None = None, at: str | datetime | None = None
    ) -> Where:
        """The commit that at most one of these names, `main`'s head without any.

        `branch` is a branch, a tag or `name@hash`. `run` is the id of a run that is at work, kept,
        discarded or published, or its first six or more characters. `at` is a time (without a zone: UTC) or a
        commit hash of `main`.
        """
        return Where.find(self._lake.nessie, branch=branch, run=run, at=at)


class QueryResult:
    """The answer to a query, as what is asked for; each call runs the query. `where` is what was read."""

    def __init__(self, relation: DuckDBPyRelation, connection: DuckDBPyConnection, where: Where) -> None:
        self.where = where
        self._relation = relation
        self._connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free DuckDB's memory; relations that were given away end too."""
        self._connection.close()

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns' names and DuckDB's types."""
        return list(zip(self._relation.columns, map(str, self._relation.types), strict=True))

    def relation(self) -> DuckDBPyRelation:
        """The query as a DuckDB relation, to be filtered, joined and grouped further."""
        return self._relation

    def arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return _asked(self._relation.to_arrow_table)

    def batches(self, rows: int = _BATCH) -> pa.RecordBatchReader:
        """The rows as a stream of Arrow batches: for results larger than memory."""
        return _stream(self._relation, rows)

    def polars(self) -> pl.DataFrame:
        """All rows as a Polars frame."""
        frame: pl.DataFrame = _asked(self._relation.pl)
        return frame

    def text_batches(self, rows: int = _BATCH, *, numbers: bool = False) -> pa.RecordBatchReader:
        """The rows as a stream with every value as text, as DuckDB prints it; `numbers` may stay numbers."""
        # By position, because two columns of a query may have the same name.
        cells = [
            f"#{number} AS {quoted(name)}"
            if numbers and is_number(kind)
            else f"CAST(#{number} AS VARCHAR) AS {quoted(name)}"
            for number, (name, kind) in enumerate(self.columns, start=1)
        ]
        return _stream(self._relation.project(", ".join(cells)), rows)


def is_number(kind: str) -> bool:
    """Whether a DuckDB type is one of numbers or truth values."""
    return _NUMBER.fullmatch(kind) is not None


def _duckdb() -> DuckDBPyConnection:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigurationError(
            "SQL queries need DuckDB, which is not installed.",
            hint="Run: pip install 'branchlake_dagster[query]'",
        ) from error
    connection = duckdb.connect(":memory:")
    _run(connection, "SET TimeZone = 'UTC'")
    return connection


def _asked(call: Callable[[], T]) -> T:
    import duckdb

    try:
        return call()
    except duckdb.Error as error:
        raise QueryFailed(str(error).strip()) from error


def _stream(relation: DuckDBPyRelation, rows: int) -> pa.RecordBatchReader:
    """The rows in batches; an error in the middle of them is QueryFailed too."""
    import pyarrow as pa

    reader = _asked(lambda: relation.to_arrow_reader(rows))

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from reader
        except (pa.ArrowException, OSError) as error:
            raise QueryFailed(str(error).strip()) from error

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _attach(connection: DuckDBPyConnection, tables: Mapping[Path, Table]) -> None:
    """Let each path name its table: the first level is a database, the second a schema (or `main`)."""
    for number, (path, table) in enumerate(tables.items()):
        if len(path) > 3:
            raise QueryFailed(
                f"DuckDB knows three levels, and {'.'.join(path)} has {len(path)}.",
                hint=f"Write {sql_name(path)}.",
                reason="more_than_three_levels",
                subject=".".join(path),
            )
        if path[0].lower() in _RESERVED:
            raise QueryFailed(
                f"DuckDB keeps the name {path[0]} for itself.",
                hint=f"Read {'.'.join(path)} by LakeReader.table.",
            )
        source = f"__branchlake_{number}"
        dataset = IcebergDataset(table)
        # What it refuses is told here; inside DuckDB it would become DuckDB's error.
        dataset.plan()
        connection.register(source, dataset)
        database, schema = path[0], path[1] if len(path) == 3 else "main"
        if database.lower() == "main" and len(path) == 2:
            database = "memory"
        elif database.lower() != "memory":
            _run(connection, f"ATTACH IF NOT EXISTS ':memory:' AS {quoted(database)}")
        _run(connection, f"CREATE SCHEMA IF NOT EXISTS {quoted(database)}.{quoted(schema)}")
        view = f"{quoted(database)}.{quoted(schema)}.{quoted(path[-1])}"
        _run(connection, f"CREATE VIEW {view} AS FROM {source}")


def _run(connection: DuckDBPyConnection, sql: str) -> None:
    # DuckDB wants every result fetched, also those without rows.
    _asked(lambda: connection.execute(sql).fetchall())
