"""The tables of an ingestion as assets: each materialisation is one batch on the run's branch."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.branching.resources.spark_resource import BranchSparkResource
from branchlake_dagster.branching.table.provenance import PREFIX, materialisation_metadata
from branchlake_dagster.branching.table.spec import table_metadata, table_spec
from branchlake_dagster.checks.asset_checks.columns import column_metadata
from branchlake_dagster.ingest.batch.earlier_attempts import take_back
from branchlake_dagster.ingest.batch.ingest_batch import BatchResult, Place, ingest_batch, look
from branchlake_dagster.ingest.batch.reprocess import Chosen, reprocess_batch
from branchlake_dagster.ingest.batch.targets import Identifier, identifiers
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.running.report import (
    check_results,
    check_specs,
    sentence,
    table_metadata_of,
)
from branchlake_dagster.ingest.running.source import source_of, topic_key
from branchlake_dagster.lakehouse.lakehouse import Lakehouse

INGESTION_TAG = "branchlake/ingestion"
"""On each run of an ingestion: its name. Two at once would only get in each other's way."""
REPROCESS_TAG = "branchlake/reprocess"
"""On a run that puts dead letters back instead of reading topics: which, as `Chosen.text` has it."""
declared: dict[str, Ingest] = {}
"""The ingestions of the code locations that this process has loaded, by name."""

_KINDS = {"kafka": "kafka", "landing": "parquet"}


def tasks_of(lake: Lakehouse) -> int:
    """How many tasks read a batch: as many as the embedded Spark has cores; a cluster has its own mind."""
    return max(2, os.cpu_count() or 2) if lake.settings.embedded_spark else 32


def batch_assets(ingest: Ingest) -> dg.AssetsDefinition:
    """The tables of an ingestion, and its dead letters, as one multi-asset."""
    declared[ingest.name] = ingest

    @dg.multi_asset(
        name=f"ingest_{ingest.name}",
        specs=list(asset_specs(ingest)),
        check_specs=check_specs(ingest),
        op_tags={INGESTION_TAG: ingest.name},
    )
    def ingested(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
        lake = lakehouse.lakehouse
        wanted = identifiers(ingest, lake.settings.default_namespace)
        if (text := context.run.tags.get(REPROCESS_TAG)) is not None:
            chosen = Chosen.from_text(text)
            yield from _reprocessed(ingest, context, lakehouse, spark, wanted, chosen)
            return
        source = source_of(ingest, lake.settings)
        place = _place(context, lakehouse, spark)
        _begin_anew(context, ingest, place, wanted)
        catalog = lakehouse.own_catalog()
        before = look(ingest, lake.nessie, catalog, wanted, source.topics)
        for note in before.plan.notes:
            context.log.warning(note)
        if before.plan.empty:
            context.log.info("There is nothing to read.")
            yield from check_results(ingest, {}, wanted)
            return
        result = ingest_batch(ingest, before, place, source.records, wanted, tasks=tasks_of(lake))
        context.log.info(sentence(result))
        again = context.op_execution_context.retry_number > 0
        yield from _materialised(ingest, result, lakehouse, wanted, again, known=before.tables.get)
        yield from check_results(ingest, result.scanned.counts, wanted)

    return ingested


def _reprocessed(
    ingest: Ingest,
    context: dg.AssetExecutionContext,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
    wanted: dict[str, Identifier],
    chosen: Chosen,
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """Dead letters put back, what became of the tables that took them, and the verdicts."""
    scanned = reprocess_batch(ingest, _place(context, lakehouse, spark), wanted, chosen)
    if scanned is None:
        context.log.info("No dead letter is to be put back.")
        yield from check_results(ingest, {}, wanted, again=True)
        return
    context.log.info(
        f"Put {scanned.counts['records']} dead letters back; {scanned.counts['dead']} failed again."
    )
    catalog, settings = lakehouse.own_catalog(), lakehouse.lakehouse.settings
    keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
    metadata = {spec.key: spec.metadata for spec in asset_specs(ingest)}
    for number, (key, identifier) in enumerate(zip(keys, wanted.values(), strict=True)):
        if scanned.rows(number) or key == keys[-1]:
            spec = table_spec(
                key, metadata[key], default_namespace=settings.default_namespace, partitioned=False
            )
            table = catalog.load_table(identifier)
            told = materialisation_metadata(table, spec, lakehouse.run_branch, partition_rows=None)
            yield dg.MaterializeResult(asset_key=key, metadata=told)
    yield from check_results(ingest, scanned.counts, wanted, again=True)


def asset_specs(ingest: Ingest) -> Iterator[dg.AssetSpec]:
    """Each table's asset, made from the topics."""
    topics = [topic_key(ingest, topic) for topic in ingest.topics]
    for table in ingest.tables:
        mode = table_metadata(
            write_mode="append" if table.mode == "append" else "upsert",
            keys=table.keys,
            layout=table.layout,
            properties=table.properties,
        )
        if table.contract is not None:
            mode |= column_metadata(table.contract)
        yield dg.AssetSpec(
            table.asset,
            deps=topics,
            description=table.description
            or f"Records of {', '.join(ingest.topics)}, ingested by {ingest.name}.",
            metadata=mode,
            skippable=True,
            kinds={"iceberg", _KINDS[ingest.source], "spark"},
            freshness_policy=table.freshness_policy,
            group_name=f"ingest_{ingest.name}",
        )
    yield dg.AssetSpec(
        ingest.dead_letters_asset,
        deps=topics,
        description=f"Records that ingestion {ingest.name} could not put into any table, as they were.",
        metadata=table_metadata(write_mode="append"),
        skippable=True,
        kinds={"iceberg", _KINDS[ingest.source]},
        group_name=f"ingest_{ingest.name}",
    )


def _place(
    context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
) -> Place:
    run = lakehouse.run_branch
    opened = run.open() if run is not None else None
    origin = {
        f"{PREFIX}run_id": context.run.run_id,
        f"{PREFIX}root_run_id": context.run.root_run_id or context.run.run_id,
        f"{PREFIX}step": str(context.op_execution_context.op_handle),
        f"{PREFIX}attempt": str(context.op_execution_context.retry_number + 1),
    }
    if opened is not None:
        origin[f"{PREFIX}base_hash"] = opened.base_hash
    return Place(
        lakehouse.lakehouse,
        lakehouse.open_branch(),
        lakehouse.own_catalog(),
        spark.own_session,
        context.run.run_id,
        origin,
        lakehouse.maker(),
    )


def _begin_anew(
    context: dg.AssetExecutionContext, ingest: Ingest, place: Place, wanted: dict[str, Identifier]
) -> None:
    """Forget what an earlier attempt of the step committed: in this run, or in the one that it retries."""
    base = place.origin.get(f"{PREFIX}base_hash")
    if base is not None and take_back(
        place.lake.nessie,
        place.branch,
        base,
        wanted.values(),
        ingestion=ingest.name,
        properties=place.properties,
    ):
        context.log.warning("An earlier attempt had committed its batch. It was taken back.")


def _materialised(
    ingest: Ingest,
    result: BatchResult,
    lakehouse: LakehouseResource,
    wanted: dict[str, Identifier],
    again: bool,
    *,
    known: Callable[[str], object],
) -> Iterator[dg.MaterializeResult[Any]]:
    """What became of the tables that the batch has changed; after a retry of all, for an attempt may have."""
    catalog, settings = lakehouse.own_catalog(), lakehouse.lakehouse.settings
    specs = {spec.key: spec for spec in asset_specs(ingest)}
    keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
    for number, (key, target) in enumerate(zip(keys, result.targets, strict=True)):
        last = number == len(keys) - 1
        if not (last or again or result.scanned.rows(number) or known(target.name) is None):
            continue
        table = catalog.load_table(wanted[target.name])
        spec = table_spec(
            key, specs[key].metadata, default_namespace=settings.default_namespace, partitioned=False
        )
        metadata = materialisation_metadata(table, spec, lakehouse.run_branch, partition_rows=None)
        yield dg.MaterializeResult(asset_key=key, metadata={**metadata, **table_metadata_of(result, number)})
