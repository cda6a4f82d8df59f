"""Changes for assets that write by SQL: as tables on the run's branch, and as ranges of values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagster import AssetExecutionContext, AssetKey
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.ranges import Ranges
from branchlake_dagster.incremental import outputs
from branchlake_dagster.incremental.change_tables import ChangeTablePair, ChangeTables
from branchlake_dagster.incremental.commits import MainCommit
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import UpstreamTable
from branchlake_dagster.incremental.inputs import select_partition_rows
from branchlake_dagster.incremental.step_consumption import consumption_of
from branchlake_dagster.internals.dagster import CoercibleToAssetKey
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.tables.specification import format_table_name


class Changes:
    """The changes that a running asset consumes, provided by `with read_changes(…) as changes`.

    Attributes:
        whole (bool): Whether the asset gets everything, so that its result must replace all earlier rows: the
            first run, or a rebuild.
        empty (bool): Whether there is nothing to consume. False with `whole`.
        partitions (Tuple[str, ...]): The partitions of the run; empty for an asset without partitions.

    Examples:
        .. code-block:: python

            with read_changes(context, lakehouse) as changes:
                days = changes.ranges("day")
                if days.span is not None:
                    context.log.info("from %s to %s", days.span.low, days.span.high)
    """

    def __init__(self, consumption: Consumption, tables: ChangeTables) -> None:
        self._consumption = consumption
        self._tables = tables
        self._pairs: dict[AssetKey, ChangeTablePair] = {}
        self.whole = consumption.whole
        self.empty = not consumption.whole and consumption.empty
        self.partitions = consumption.partitions

    def added(self, asset: CoercibleToAssetKey) -> str:
        """Return the Spark name of a table with an input's added rows; with `whole`, with all its rows.

        For a partitioned asset, the table has only rows of the run's partitions, if the input has their
        columns. The table refers to the changed files, or has copies of rows if other rows are in these
        files, and is dropped when the `read_changes` block ends. With `whole` and without partitions, the
        name is that of the input itself. PyIceberg and DuckDB can read the table too.

        Raises ConfigurationError for an asset that is not consumed, and TableMissing for an optional input
        without a table.
        """
        upstream = self._require_input(asset)
        if self.whole and not self.partitions:
            return f"nessie.{quote_spark_path(self._consumption.consumer.inputs[upstream.key])}"
        return self._change_table_name(upstream, removed=False)

    def removed(self, asset: CoercibleToAssetKey) -> str:
        """Return the Spark name of a table with an input's removed rows.

        Unchanged rows of rewritten files are in both tables: a row in both has not changed. Raises
        ConfigurationError with `whole`.
        """
        upstream = self._require_input(asset)
        if self.whole:
            raise ConfigurationError(
                "Everything is computed anew, so there are no removed rows.",
                hint="Call removed() only if changes.whole is False.",
            )
        return self._change_table_name(upstream, removed=True)

    def ranges(self, column: str) -> Ranges:
        """Return the smallest ranges that contain a column's values in the changed rows of all inputs.

        They come from the bounds of files, so they may contain other values. No data file is read.
        """
        return self._consumption.ranges(column)

    def commits(self, asset: CoercibleToAssetKey) -> list[MainCommit]:
        """Return the commits on `main` that published an input's change, oldest first; [] with `whole`.

        Rows that this run has written itself are not published yet, so they have no commit.
        """
        upstream = self._require_input(asset)
        return [] if self.whole else self._consumption.commits(upstream.key)

    def _require_input(self, asset: CoercibleToAssetKey) -> UpstreamTable:
        key = AssetKey.from_coercible(asset)
        if key in self._consumption.consumer.declaration.optional and key not in self._consumption.inputs:
            raise TableMissing(
                f"Asset {key.to_user_string()} has no table yet.",
                table=format_table_name(self._consumption.consumer.inputs[key]),
                hint="The input is optional: leave it out until its table exists.",
            )
        if key not in self._consumption.inputs:
            names = ", ".join(asset_key.to_user_string() for asset_key in self._consumption.inputs)
            raise ConfigurationError(
                f"Asset {self._consumption.consumer.asset} does not consume {key.to_user_string()}, only"
                f" {names}.",
                hint="Add the input to consumes({…}) in the asset's metadata.",
            )
        return self._consumption.inputs[key]

    def _change_table_name(self, upstream: UpstreamTable, *, removed: bool) -> str:
        consumer = self._consumption.consumer
        if upstream.key not in self._pairs:
            ((_, change),) = self._consumption.changes(upstream.key)
            new_pair = self._tables.create_pair(
                upstream,
                consumer.inputs[upstream.key],
                consumer.spec.identifier,
                change,
                where=select_partition_rows(self._consumption, upstream, self.partitions),
            )
            self._pairs[upstream.key] = new_pair
        pair = self._pairs[upstream.key]
        name = pair.removed if removed else pair.added
        identifier = name or self._tables.create_empty(upstream, consumer.inputs[upstream.key])
        return f"nessie.{quote_spark_path(identifier)}"


def computes_everything(context: AssetExecutionContext, lakehouse: LakehouseResource) -> bool:
    """Return whether a running asset consumes everything, so that its result replaces its whole table.

    This is so in the asset's first run, in a rebuild, and where its recorded positions do not apply. An asset
    whose result depends on its own earlier rows must then return these rows, too.

    Args:
        context (AssetExecutionContext): The context of the running asset.
        lakehouse (LakehouseResource): The lake.

    Returns:
        bool: Whether everything is consumed.

    Raises:
        ConfigurationError: The asset does not consume changes.

    Examples:
        .. code-block:: python

            entries = derive_entries(changes, earlier_rows)
            return earlier_rows.union(entries) if computes_everything(context, lakehouse) else entries
    """
    consumption = consumption_of(_step_context(context), lakehouse)
    if consumption is None:
        raise ConfigurationError(
            f"Asset {context.asset_key.to_user_string()} does not consume changes.",
            hint="Declare them with consumes({…}) in the asset's metadata.",
        )
    return consumption.whole


@contextmanager
def read_changes(context: AssetExecutionContext, lakehouse: LakehouseResource) -> Iterator[Changes]:
    """Read the changes that a running asset consumes, for an asset that writes its table by SQL.

    When the block ends without an error, the asset's table records what was consumed, and the change tables
    are dropped. Assets that return frames do not need this: their inputs are the changes.

    Args:
        context (AssetExecutionContext): The context of an asset with `consumes(…)` in its metadata.
        lakehouse (LakehouseResource): The lake.

    Yields:
        Changes: Tables of added and removed rows, and ranges of values.

    Raises:
        ConfigurationError: The asset does not declare what it consumes, or its partitions are at different
            positions, so no single table can hold their changes.
        ChangeLost: The change of an input is no longer known.
        TableMissing: The asset has no table at the end.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import BranchSparkResource, LakehouseResource, consumes, read_changes

            @dg.asset(
                deps=["orders"],
                metadata={"branchlake/write_mode": "append"} | consumes({"orders": "rows"}),
            )
            def lines(
                context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
            ) -> None:
                sql = spark.spark_session.sql
                with read_changes(context, lakehouse) as changes:
                    if changes.whole:
                        sql("CREATE TABLE IF NOT EXISTS nessie.lake.lines (price INT)")
                        sql("DELETE FROM nessie.lake.lines")
                    sql(f"INSERT INTO nessie.lake.lines SELECT price FROM {changes.added('orders')}")
    """
    consumption = consumption_of(_step_context(context), lakehouse)
    if consumption is None:
        raise ConfigurationError(
            f"Asset {context.asset_key.to_user_string()} does not declare what it consumes.",
            hint="Add consumes({…}) to the asset's metadata.",
        )
    if len(consumption.groups) > 1:
        raise ConfigurationError(
            "The partitions of this run are at different positions, so no single change table can hold their"
            " changes.",
            partitions=consumption.partitions,
            hint="Launch one run for each partition, or load the input as a frame.",
        )
    tables = ChangeTables(lakehouse)
    consumption.cleanup_callbacks.append(tables.drop)
    yield Changes(consumption, tables)
    spec = consumption.consumer.spec
    try:
        table = lakehouse.own_catalog().load_table(spec.identifier)
    except NoSuchTableError as error:
        raise TableMissing(
            "The asset has no table on the run's branch, so its consumption cannot be recorded.",
            table=spec.name,
            branch=lakehouse.open_branch(),
            hint="Create the table in the asset.",
        ) from error
    outputs.record_consumption(consumption, table)
    consumption.clean_up()


def _step_context(context: AssetExecutionContext) -> Any:
    return context.op_execution_context.get_step_execution_context()
