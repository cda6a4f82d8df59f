"""The code location of the runs behind the lossy network: each row that a run writes has the run's id.

`shared` and `beside` are appended to by two kinds of runs and must always hold the same ones. `parts` has
partitions replaced. `watched` is read by the serializable `strict`, whose rows say how many rows they saw.
`counted` has a check on its whole table.
"""

import dagster as dg
import polars as pl

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.publication.run_publication import publish_at_end
from branchlake_dagster.tables.specification import table_metadata

NAMESPACE = "lossy"
PARTITIONS = tuple(f"p{number}" for number in range(8))
SPOILT = "lossy/spoilt"
"""The tag of a run whose check fails."""
BROKEN = "lossy/broken"
"""The tag of a run whose second step fails."""
KIND = "lossy/kind"

_rows_of_run = {"branchlake/scope": "rows"}


def _token(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return pl.DataFrame({"token": [context.run.run_id]})


@dg.asset(key=[NAMESPACE, "shared"], metadata=table_metadata(write_mode="append"))
def shared(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return _token(context)


@dg.asset_check(asset=shared, metadata=_rows_of_run)
def not_spoilt(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=SPOILT not in context.run.tags)


@dg.asset(
    key=[NAMESPACE, "beside"],
    metadata=table_metadata(write_mode="append", require_checks=False),
    deps=[shared],
)
def beside(context: dg.AssetExecutionContext) -> pl.DataFrame:
    if BROKEN in context.run.tags:
        raise dg.Failure("broken on purpose", allow_retries=False)
    return _token(context)


@dg.asset(
    key=[NAMESPACE, "parts"],
    partitions_def=dg.StaticPartitionsDefinition(list(PARTITIONS)),
    metadata=table_metadata(partition_by="part", require_checks=False),
)
def parts(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return _token(context).with_columns(part=pl.lit(context.partition_key))


@dg.asset(key=[NAMESPACE, "watched"], metadata=table_metadata(write_mode="append", require_checks=False))
def watched(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return _token(context)


@dg.asset(
    key=[NAMESPACE, "strict"],
    metadata=table_metadata(write_mode="append", require_checks=False, isolation="serializable"),
)
def strict(context: dg.AssetExecutionContext, watched: pl.DataFrame) -> pl.DataFrame:
    return _token(context).with_columns(seen=pl.lit(len(watched)))


@dg.asset(key=[NAMESPACE, "counted"], metadata=table_metadata(write_mode="append"))
def counted(context: dg.AssetExecutionContext) -> pl.DataFrame:
    return _token(context)


@dg.asset_check(asset=counted, metadata={"branchlake/scope": "table"})
def each_once(counted: pl.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=counted["token"].is_unique().all(), metadata={"rows": dg.MetadataValue.int(len(counted))}
    )


_in_process = dg.in_process_executor
_both = dg.AssetSelection.assets(shared, beside)

defs = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(
        assets=[shared, beside, parts, watched, strict, counted],
        asset_checks=[not_spoilt, each_once],
        executor=_in_process,
        jobs=[
            dg.define_asset_job("append", selection=_both),
            dg.define_asset_job("inside", selection=_both, executor_def=publish_at_end(_in_process)),
            dg.define_asset_job("replace", selection=dg.AssetSelection.assets(parts)),
            dg.define_asset_job("watch", selection=dg.AssetSelection.assets(watched)),
            dg.define_asset_job("strict", selection=dg.AssetSelection.assets(strict)),
            dg.define_asset_job("count", selection=dg.AssetSelection.assets(counted)),
        ],
    ),
)
