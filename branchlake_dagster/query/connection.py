"""The reader of a running lake, `connect()`, and the results of its queries."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self, TypeVar

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse, quote_sql_name, sql_name
from branchlake_dagster.nessie.errors import NessieNotFound
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.query.dataset import IcebergDataset
from branchlake_dagster.query.reference import (
    LakeState,
    NoSuchState,
    QueryFailed,
    TablePath,
    find_expiry,
    find_table_paths,
    load_table_keys,
    resolve_tables,
    table_not_there,
)
from branchlake_dagster.runs.temporary_tags import current_time, keep_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import ReferencePrefix

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

_RESERVED = ("system", "temp", "information_schema", "pg_catalog")
_BATCH_ROWS = 65_536
_MAX_HOLD_HOURS = 168
_NUMBER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL\(.*\)|BOOLEAN")
T = TypeVar("T")


def connect(settings: Settings | None = None) -> LakeReader:
    """Connect to a running lake for reading. Starts no server and creates no folder.

    Args:
        settings (Optional[Settings]): Where the lake is. (default: the environment's `BRANCHLAKE_…`)

    Returns:
        LakeReader: Runs SQL and returns tables, at `main`, a branch, a run or a time.

    Raises:
        LakeNotRunning: The lake's embedded Nessie is down, or the state folder does not contain a lake. The
            hint is the command that starts it.

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
    """Reads a lake at `main`, a branch, a run or a time. Results stay readable after the reader is gone."""

    def __init__(self, lake: Lakehouse, *, now: Callable[[], datetime] = current_time) -> None:
        self._lake = lake
        self._now = now

    def sql(
        self,
        query: str,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> QueryResult:
        """Prepare one query in DuckDB's SQL; it runs when its result is read.

        Write tables as `namespace.table`, with double quotes around names that need them. The inner levels of
        a deep namespace are one name: `a."b.c".t`. All tables are read at one commit. For `branch`, `run` and
        `at` see `find_state`.

        Raises QueryFailed if DuckDB or PyIceberg refuses the query; TableNotThere; NoSuchState; MomentExpired
        if the files were deleted for their age; and ConfigurationError for invalid arguments or if DuckDB is
        not installed.
        """
        state = self.find_state(branch=branch, run=run, at=at)
        connection = _open_duckdb()
        try:
            table_paths = find_table_paths(connection, query)
            keys = _merge_equal_names(
                resolve_tables(self._lake.nessie, state, [path for path in table_paths if len(path) > 1])
            )
            tables = {path: self._load_table(state, key) for path, key in keys.items()}
            datasets = _attach_tables(connection, tables)
            try:
                relation = _run_duckdb(lambda: connection.sql(query))
            except QueryFailed as error:
                error.hint = self._suggest_namespaces(table_paths, state)
                raise
            return QueryResult(relation, connection, state, datasets)
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
        """Load a table for PyIceberg (`.scan(…)`, `.to_polars()`, `.inspect`) at a fixed commit, read-only.

        `name` is dotted; put an element that contains dots in backticks. For `branch`, `run` and `at` see
        `find_state`. Raises TableNotThere, which is also PyIceberg's NoSuchTableError; NoSuchState;
        MomentExpired if the files were deleted for their age; and ConfigurationError if `name` is not valid.
        """
        try:
            key = ContentKey.from_path(name)
        except ValueError as error:
            raise ConfigurationError(
                f"{name!r} is not the name of a table.",
                hint="Write namespace.table; put an element that contains dots in backticks.",
                reason="table_name",
                subject=name,
            ) from error
        state = self.find_state(branch=branch, run=run, at=at)
        try:
            return self._load_table(state, key)
        except NoSuchTableError as error:
            raise table_not_there(key.elements, load_table_keys(self._lake.nessie, state), state) from error

    def _load_table(self, state: LakeState, key: ContentKey) -> Table:
        try:
            return self._lake.catalog(state.ref).load_table(key.elements)
        except FileNotFoundError as error:
            horizon = self._lake.settings.history_horizon
            expiry = find_expiry(self._lake.nessie, state, horizon, datetime.now(UTC))
            if expiry is None:
                raise
            raise expiry from error

    def polars(
        self,
        name: str,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> pl.LazyFrame:
        """Return a table as a lazy Polars frame, with the S3 keys and endpoint of the settings.

        `name` is written as in `table`, and the errors are those of `table`. For `branch`, `run` and `at` see
        `find_state`.
        """
        import polars

        if find_spec("polars_iceberg") is None:
            # Without polars_iceberg Polars plans scans with PyIceberg. The variable prevents its warning.
            os.environ.setdefault("POLARS_ICEBERG_PLANNER", "pyiceberg")
        properties = self._lake.settings.file_io_properties()
        options = {name: value for name, value in properties.items() if name.startswith("s3.")}
        return polars.scan_iceberg(
            self.table(name, branch=branch, run=run, at=at), storage_options=options or None
        )

    def tables(
        self, *, branch: str | None = None, run: str | None = None, at: str | datetime | None = None
    ) -> list[str]:
        """Return the sorted names of all tables at a state, as a query writes them.

        For `branch`, `run` and `at` see `find_state`.
        """
        keys = load_table_keys(self._lake.nessie, self.find_state(branch=branch, run=run, at=at))
        return [sql_name(key) for key in keys]

    def _suggest_namespaces(self, table_paths: Iterable[TablePath], state: LakeState) -> str | None:
        """Return a hint with the full names of tables that a failed query names without a namespace.

        `table_paths` are the table names in the query, level by level. Names are compared with the tables at
        `state`, ignoring case. Returns None if none matches.
        """
        bare_names = {path[0].lower() for path in table_paths if len(path) == 1}
        all_keys = load_table_keys(self._lake.nessie, state) if bare_names else []
        keys = [key for key in all_keys if key[-1].lower() in bare_names]
        return f"Write the table with its namespace: {', '.join(map(sql_name, keys))}." if keys else None

    def find_state(
        self, *, branch: str | None = None, run: str | None = None, at: str | datetime | None = None
    ) -> LakeState:
        """Find the commit that one of the arguments names; without arguments, the head of `main`.

        `branch` is a branch, a tag or `name@hash`. `run` is the id of a run, or its first six or more
        characters; the run may be active, kept, discarded or published. `at` is a time (UTC if it has no
        zone) or a commit hash of `main`, of which the first eight characters suffice.

        Raises NoSuchState if the lake does not have the state, and ConfigurationError for more than one
        argument or an invalid argument.
        """
        return LakeState.find(self._lake.nessie, branch=branch, run=run, at=at)

    @contextmanager
    def hold_state(
        self,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
        hours: float = 6.0,
    ) -> Iterator[str]:
        """Keep a state readable while a long reader works. Yields the name of a tag, for `branch=`.

        For `branch`, `run` and `at` see `find_state`. Until the block ends, and at most for `hours` (up to
        168), no discard, expiry or collection deletes a file of the state. Spark, Trino and other readers
        can use the tag as well. It is deleted at the end of the block; if this process is killed, by a
        collection after its end. Costs three requests to Nessie.

        A state that nothing else keeps any more may lose its files while the tag is created. Reading it then
        raises MomentExpired, or FileNotFoundError for a discarded branch.

        Raises NoSuchState, and ConfigurationError for other `hours`.
        """
        if not 0 < hours <= _MAX_HOLD_HOURS:
            raise ConfigurationError(
                f"A state cannot be held for {hours} hours.",
                hint=f"Give more than 0 and at most {_MAX_HOLD_HOURS} hours, or create a tag of your own.",
                reason="hold_hours",
                subject=str(hours),
            )
        state = self.find_state(branch=branch, run=run, at=at)
        name, _, commit_hash = state.ref.rpartition("@")
        lifetime = timedelta(hours=hours)
        with ExitStack() as stack:
            tag = keep_commit(
                self._lake.nessie,
                ReferencePrefix.READING,
                commit_hash,
                from_ref=name or MAIN,
                lifetime=lifetime,
                now=self._now,
            )
            try:
                tag_name = stack.enter_context(tag)
            except NessieNotFound as missing:
                raise NoSuchState(
                    f"{state.label} does not exist any more, or does not contain commit {commit_hash}.",
                    hint="`branchlake status` lists branches, discarded runs and publications.",
                    reason="state_gone",
                    subject=state.ref,
                ) from missing
            yield tag_name


class QueryResult:
    """The result of a query, which can be read in several formats. Each read runs the query.

    `state` is the state of the lake that the query reads. `datasets` are the tables of the query. Errors
    while rows are read are raised as QueryFailed, except StoredFileDamaged, which names a damaged file. A
    relation raises DuckDB's errors; at the end of a `with` block of the result, the error of a damaged file
    becomes StoredFileDamaged.
    """

    def __init__(
        self,
        relation: DuckDBPyRelation,
        connection: DuckDBPyConnection,
        state: LakeState,
        datasets: Sequence[IcebergDataset] = (),
    ) -> None:
        self.state = state
        self._relation = relation
        self._datasets = datasets
        self._connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        import duckdb

        self.close()
        # DuckDB's streams of batches raise OSError without a number.
        is_of_stream = type(error) is OSError and error.errno is None
        if not isinstance(error, duckdb.Error) and not is_of_stream:
            return
        for dataset in self._datasets:
            # DuckDB's error has the text of the dataset's error.
            if dataset.damaged is not None and dataset.damaged.file in str(error):
                raise dataset.damaged from error

    def close(self) -> None:
        """Free DuckDB's memory; relations from `relation()` cannot be used afterwards."""
        self._connection.close()

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns of the result, as (name, DuckDB type) pairs."""
        return list(zip(self._relation.columns, map(str, self._relation.types), strict=True))

    def relation(self) -> DuckDBPyRelation:
        """Return the query as a DuckDB relation, which can be filtered, joined and grouped further.

        The relation raises DuckDB's errors, as the class describes.
        """
        return self._relation

    def arrow(self) -> pa.Table:
        """Return all rows as an Arrow table."""
        return _run_duckdb(self._relation.to_arrow_table, self._datasets)

    def batches(self, rows: int = _BATCH_ROWS) -> pa.RecordBatchReader:
        """Return the rows as a stream of Arrow batches, for results larger than memory.

        `rows` is the number of rows in a batch.
        """
        return _stream_batches(self._relation, rows, self._datasets)

    def polars(self) -> pl.DataFrame:
        """Return all rows as a Polars frame."""
        frame: pl.DataFrame = _run_duckdb(self._relation.pl, self._datasets)
        return frame

    def string_batches(self, rows: int = _BATCH_ROWS, *, numbers: bool = False) -> pa.RecordBatchReader:
        """Return the rows as a stream in which every value is a string, as DuckDB prints it.

        `rows` is the number of rows in a batch. With `numbers`, numbers and truth values keep their type.
        """
        # Use positions, because two columns of a query may have the same name.
        expressions = [
            f"#{number} AS {quote_sql_name(name)}"
            if numbers and is_number_type(type_name)
            else f"CAST(#{number} AS VARCHAR) AS {quote_sql_name(name)}"
            for number, (name, type_name) in enumerate(self.columns, start=1)
        ]
        return _stream_batches(self._relation.project(", ".join(expressions)), rows, self._datasets)


def is_number_type(type_name: str) -> bool:
    """Return whether the DuckDB type with this name is a type of numbers or BOOLEAN."""
    return _NUMBER.fullmatch(type_name) is not None


def _open_duckdb() -> DuckDBPyConnection:
    try:
        import duckdb
    except ImportError as error:
        raise ConfigurationError(
            "SQL queries need DuckDB, which is not installed.",
            hint="Run: pip install 'branchlake_dagster[query]'",
        ) from error
    connection = duckdb.connect(":memory:")
    _execute_sql(connection, "SET TimeZone = 'UTC'")
    return connection


def _run_duckdb(call: Callable[[], T], datasets: Sequence[IcebergDataset] = ()) -> T:
    import duckdb

    for dataset in datasets:
        dataset.damaged = None
    with _wrap_errors(datasets, duckdb.Error):
        return call()


@contextmanager
def _wrap_errors(datasets: Sequence[IcebergDataset], *kinds: type[Exception]) -> Iterator[None]:
    """Raise QueryFailed for an error of these `kinds`, or StoredFileDamaged if a dataset has met it."""
    try:
        yield
    except kinds as error:
        damaged = next((dataset.damaged for dataset in datasets if dataset.damaged is not None), None)
        if damaged is not None:
            raise damaged from error
        raise QueryFailed(str(error).strip()) from error


def _stream_batches(
    relation: DuckDBPyRelation, rows: int, datasets: Sequence[IcebergDataset]
) -> pa.RecordBatchReader:
    """Return the rows as a stream of batches with `rows` rows each, the last one perhaps with fewer.

    `datasets` are the tables that the query reads: they name the damaged file of an error. Raises QueryFailed
    or StoredFileDamaged, also while the stream is read.
    """
    import pyarrow as pa

    reader = _run_duckdb(lambda: relation.to_arrow_reader(rows), datasets)

    def batches() -> Iterator[pa.RecordBatch]:
        # A thread of DuckDB may have met a damaged file before the first batch is requested.
        with _wrap_errors(datasets, pa.ArrowException, OSError):
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _merge_equal_names(keys: Mapping[TablePath, ContentKey]) -> dict[TablePath, ContentKey]:
    """Return one path for each name that DuckDB distinguishes: it ignores upper and lower case.

    Raises QueryFailed if paths that DuckDB does not distinguish name several tables.
    """
    merged: dict[tuple[str, ...], tuple[TablePath, ContentKey]] = {}
    for path, key in keys.items():
        view_path = _view_path(path) if len(path) <= 3 else path  # a longer path has no view
        _, other_key = merged.setdefault(tuple(map(str.lower, view_path)), (path, key))
        if other_key != key:
            raise QueryFailed(
                f"One query cannot read {sql_name(other_key)} and {sql_name(key)}, because DuckDB does not"
                " distinguish upper and lower case.",
                hint="Read one of them with LakeReader.table, or by a query of its own.",
                reason="names_differ_in_case",
                subject=sql_name(key),
            )
    return dict(merged.values())


def _view_path(path: TablePath) -> tuple[str, str, str]:
    """Return database, schema and name of the DuckDB view of a table path with two or three levels."""
    database, schema = path[0], path[1] if len(path) == 3 else "main"
    return "memory" if database.lower() == "main" and len(path) == 2 else database, schema, path[-1]


def _attach_tables(connection: DuckDBPyConnection, tables: Mapping[TablePath, Table]) -> list[IcebergDataset]:
    """Create a DuckDB view for each table, under the path by which the query names it. Return its datasets.

    The first level of a path becomes a database. Of three levels the second becomes a schema; otherwise the
    schema is `main`. Raises QueryFailed for more than three levels and for names that DuckDB reserves.
    """
    datasets: list[IcebergDataset] = []
    for number, (path, table) in enumerate(tables.items()):
        if len(path) > 3:
            raise QueryFailed(
                f"DuckDB reads names of at most three levels, and {'.'.join(path)} has {len(path)}.",
                hint=f"Write {sql_name(path)}.",
                reason="more_than_three_levels",
                subject=".".join(path),
            )
        if path[0].lower() in _RESERVED:
            raise QueryFailed(
                f"The table {'.'.join(path)} cannot be read by SQL: DuckDB reserves the name {path[0]}.",
                hint=f"Read {'.'.join(path)} with LakeReader.table.",
            )
        source = f"__branchlake_{number}"
        dataset = IcebergDataset(table)
        datasets.append(dataset)
        # Plan now, so that a refusal is raised as it is. Inside DuckDB it would become DuckDB's error.
        dataset.plan_files()
        connection.register(source, dataset)
        database, schema, name = _view_path(path)
        if database.lower() != "memory":
            _execute_sql(connection, f"ATTACH IF NOT EXISTS ':memory:' AS {quote_sql_name(database)}")
        _execute_sql(
            connection, f"CREATE SCHEMA IF NOT EXISTS {quote_sql_name(database)}.{quote_sql_name(schema)}"
        )
        view = f"{quote_sql_name(database)}.{quote_sql_name(schema)}.{quote_sql_name(name)}"
        _execute_sql(connection, f"CREATE VIEW {view} AS FROM {source}")
    return datasets


def _execute_sql(connection: DuckDBPyConnection, sql: str) -> None:
    # DuckDB requires that every result is fetched, also results without rows.
    _run_duckdb(lambda: connection.execute(sql).fetchall())
