"""Changes for assets that write by SQL: as tables on the run's branch, and as ranges."""

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
from branchlake_dagster.incremental.consumer import UpstreamTable
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.inputs import select_partition_rows
from branchlake_dagster.incremental.step_consumption import consumption_of
from branchlake_dagster.internals.dagster import CoercibleToAssetKey
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.spark.session import quote_spark_path
from branchlake_dagster.tables.errors import TableMissing


class Changes:
    """What a running asset consumes, as `read_changes` gives it.

    Attributes:
        whole (bool): Whether it gets everything, so that its result must replace all there was: the first
            run, a rebuild.
        empty (bool): Whether there is nothing to consume.
        partitions (Tuple[str, ...]): The run's partitions, of a partitioned asset.

    Examples:
        .. code-block:: python

            with consume(context, lakehouse) as changes:
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
        """The Spark name of a table of an input's rows that came; with `whole`, of all its rows.

        Of a partitioned asset: of those that belong to the run's partitions, as far as the input has their
        columns. It refers to the changed files and is gone when the asset ends. Also PyIceberg and DuckDB
        read it.
        """
        upstream = self._require_input(asset)
        if self.whole and not self.partitions:
            return f"nessie.{quote_spark_path(self._consumption.consumer.inputs[upstream.key])}"
        return self._change_table_name(upstream, removed=False)

    def removed(self, asset: CoercibleToAssetKey) -> str:
        """The Spark name of a table of an input's rows that went; rewritten files carry some along.

        What is in both tables has not changed. Raises ConfigurationError with `whole`.
        """
        upstream = self._require_input(asset)
        if self.whole:
            raise ConfigurationError(
                "Everything is computed anew, so no row has gone.", hint="Ask changes.whole first."
            )
        return self._change_table_name(upstream, removed=True)

    def ranges(self, column: str) -> Ranges:
        """The values of a column in all changed rows, of all inputs, from bounds alone."""
        return self._consumption.ranges(column)

    def commits(self, asset: CoercibleToAssetKey) -> list[MainCommit]:
        """The commits on `main` that published an input's change, oldest first; none with `whole`.

        Rows that this run itself has published nowhere yet are of none.
        """
        upstream = self._require_input(asset)
        return [] if self.whole else self._consumption.commits(upstream.key)

    def _require_input(self, asset: CoercibleToAssetKey) -> UpstreamTable:
        key = AssetKey.from_coercible(asset)
        if key not in self._consumption.inputs:
            names = ", ".join(asset_key.to_user_string() for asset_key in self._consumption.inputs)
            raise ConfigurationError(
                f"{key.to_user_string()} is not among the inputs that {self._consumption.consumer.asset}"
                f" consumes: {names}.",
                hint="Name it in consumes({…}).",
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
        return f"nessie.{quote_spark_path(name or self._tables.create_empty(upstream, consumer.inputs[upstream.key]))}"


@contextmanager
def read_changes(context: AssetExecutionContext, lakehouse: LakehouseResource) -> Iterator[Changes]:
    """The changes that a running asset consumes, for one that writes its table by SQL.

    When the block ends without an error, the asset's table is told what was consumed, and the change tables
    are gone. Assets that return frames need none of this: their inputs are the changes.

    Args:
        context (AssetExecutionContext): Of an asset with `consumes(…)` in its metadata.
        lakehouse (LakehouseResource): The lake.

    Yields:
        Changes: Tables of rows that came and went, and ranges.

    Raises:
        ConfigurationError: The asset does not say what it consumes, or its partitions stand at different
            positions, so that no single table is their change.
        ChangeLost: An input's change cannot be told.
        TableMissing: The asset has no table at the end.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import BranchSparkResource, LakehouseResource, consume, consumes

            @dg.asset(
                deps=["orders"],
                metadata={"branchlake/write_mode": "append"} | consumes({"orders": "rows"}),
            )
            def lines(
                context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
            ) -> None:
                sql = spark.spark_session.sql
                with consume(context, lakehouse) as changes:
                    if changes.whole:
                        sql("CREATE TABLE IF NOT EXISTS nessie.lake.lines (price INT)")
                        sql("DELETE FROM nessie.lake.lines")
                    sql(f"INSERT INTO nessie.lake.lines SELECT price FROM {changes.added('orders')}")
    """
    consumption = consumption_of(_step_context(context), lakehouse)
    if consumption is None:
        raise ConfigurationError(
            f"{context.asset_key.to_user_string()} does not say what it consumes.",
            hint="Add consumes({…}) to its metadata.",
        )
    if len(consumption.groups) > 1:
        raise ConfigurationError(
            "The run's partitions have consumed different changes, so what they have left is no one table.",
            partitions=consumption.partitions,
            hint="Launch them as runs of their own, or load the input as a frame.",
        )
    tables = ChangeTables(lakehouse)
    consumption.cleanup_callbacks.append(tables.drop)
    yield Changes(consumption, tables)
    spec = consumption.consumer.spec
    try:
        table = lakehouse.own_catalog().load_table(spec.identifier)
    except NoSuchTableError as error:
        raise TableMissing(
            "The asset has no table, so nothing can be told to have been consumed for it.",
            table=spec.name,
            branch=lakehouse.open_branch(),
            hint="Create it in the asset.",
        ) from error
    outputs.record_consumption(consumption, table)
    consumption.clean_up()


def _step_context(context: AssetExecutionContext) -> Any:
    return context.op_execution_context.get_step_execution_context()
