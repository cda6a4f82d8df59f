"""The code location of test_kill.py: several kinds of runs that write one table, each row with its run's id.

Loaded in the processes that are killed. `shared` is appended to by two kinds of runs and has partitions
replaced by a third; the first two write `beside` too, which must always hold the same runs as `shared`.
"""

import dagster as dg
import pyarrow as pa

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.publication.run_publication import publish_at_end
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = "kill"
APPENDED = "appended"
REPLACED = ("replaced-0", "replaced-1")
ROWS = 3
SPOILT = "kill/spoilt"
"""The tag of a run whose check fails."""

parts = dg.StaticPartitionsDefinition([APPENDED, *REPLACED])
rows_of_run = {"branchlake/scope": "rows"}


def rows(context: dg.AssetExecutionContext, part: str) -> pa.Table:
    return pa.table({"part": [part] * ROWS, "token": [context.run.run_id] * ROWS, "n": list(range(ROWS))})


def appending() -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    @dg.asset(
        key=[NAMESPACE, "shared"],
        partitions_def=parts,
        metadata=table_metadata(write_mode="append", partition_by="part"),
    )
    def shared(context: dg.AssetExecutionContext) -> pa.Table:
        return rows(context, APPENDED)

    @dg.asset(
        key=[NAMESPACE, "beside"],
        metadata=table_metadata(write_mode="append", require_checks=False),
        deps=[shared],
    )
    def beside(context: dg.AssetExecutionContext) -> pa.Table:
        return rows(context, APPENDED)

    return [shared, beside, unspoilt(shared)]


def replacing() -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    @dg.asset(key=[NAMESPACE, "shared"], partitions_def=parts, metadata=table_metadata(partition_by="part"))
    def shared(context: dg.AssetExecutionContext) -> pa.Table:
        return rows(context, context.partition_key)

    return [shared, unspoilt(shared)]


def unspoilt(asset: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, metadata=rows_of_run)
    def not_spoilt(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=SPOILT not in context.run.tags)

    return not_spoilt


def location(
    assets: list[dg.AssetsDefinition | dg.AssetChecksDefinition], *, inside: bool = False
) -> dg.Definitions:
    """A code location with one job, `write`; `inside`: whose runs publish themselves."""
    executor = publish_at_end(dg.in_process_executor) if inside else dg.in_process_executor
    found = dg.Definitions(
        assets=[one for one in assets if not isinstance(one, dg.AssetChecksDefinition)],
        asset_checks=[one for one in assets if isinstance(one, dg.AssetChecksDefinition)],
        jobs=[dg.define_asset_job("write", selection=dg.AssetSelection.all(), executor_def=executor)],
    )
    return dg.Definitions.merge(branchlake_definitions(), found)


appender = location(appending())
publishing = location(appending(), inside=True)
replacer = location(replacing())
