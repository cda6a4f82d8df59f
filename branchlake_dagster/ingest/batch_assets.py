"""The tables of an ingestion as assets: each materialisation is one batch on the run's branch."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg

from branchlake_dagster.checks.column_metadata import column_metadata
from branchlake_dagster.ingest.batch_context import Place, known_tables, look
from branchlake_dagster.ingest.batch_report import (
    check_results,
    check_specs,
    evaluation,
    sentence,
    table_metadata_of,
)
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.declaration import Expanded, Ingest, IngestTable, expanded
from branchlake_dagster.ingest.earlier_attempts import take_back
from branchlake_dagster.ingest.ingest_batch import BatchResult, ingest_batch
from branchlake_dagster.ingest.observation import topic_key
from branchlake_dagster.ingest.reprocessing import Chosen, reprocess_batch
from branchlake_dagster.ingest.topic_source import source_of
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import materialisation_metadata
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import AssetMetadata, LakeProperty, RunTag
from branchlake_dagster.tables.specification import table_metadata, table_spec

declared: dict[str, Ingest] = {}
"""The ingestions of the code locations that this process has loaded, by name."""

_KINDS = {"kafka": "kafka", "landing": "parquet"}


def tasks_of(lake: Lakehouse) -> int:
    """How many tasks read a batch: as many as the embedded Spark has cores; a cluster has its own mind."""
    return max(2, os.cpu_count() or 2) if lake.settings.embedded_spark else 32


def batch_assets(ingest: Ingest, *, live: bool = True) -> dg.AssetsDefinition:
    """The tables of an ingestion, and its dead letters, as one multi-asset; `live`: it has a live run too."""
    declared[ingest.name] = ingest

    @dg.multi_asset(
        name=f"ingest_{ingest.name}",
        specs=list(asset_specs(ingest, live=live)),
        check_specs=check_specs(ingest),
        op_tags={RunTag.INGESTION: ingest.name},
    )
    def ingested(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
        lake = lakehouse.lakehouse
        if (text := context.run.tags.get(RunTag.REPROCESS)) is not None:
            yield from _reprocessed(ingest, context, lakehouse, spark, Chosen.from_text(text))
            return
        source, space = source_of(ingest, lake.settings), lake.settings.default_namespace
        place = _place(context, lakehouse, spark)
        _begin_anew(context, ingest, place)
        before = look(ingest, lake.nessie, lakehouse.own_catalog(), source.topics, namespace=space)
        for note in before.plan.notes:
            context.log.warning(note)
        if before.plan.empty:
            context.log.info("There is nothing to read.")
            yield from check_results(expanded(ingest, {}), {}, before.wanted)
            return
        result = ingest_batch(before, place, source.records, tasks=tasks_of(lake))
        for note in result.notes[len(before.plan.notes) :]:
            context.log.warning(note)
        context.log.info(sentence(result))
        again = context.op_execution_context.retry_number > 0
        found = _materialised(result, lakehouse, again, known=before.tables.get)
        names = [one.name for one in result.targets]
        checks = check_results(result.ingest, result.scanned.counts, names)
        yield from _declared_alone(context, ingest, [*found, *checks])

    return ingested


def _reprocessed(
    ingest: Ingest,
    context: dg.AssetExecutionContext,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
    chosen: Chosen,
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """Dead letters put back, what became of the tables that took them, and the verdicts."""
    place = _place(context, lakehouse, spark)
    _begin_anew(context, ingest, place)
    done = reprocess_batch(ingest, place, chosen)
    if done is None:
        context.log.info("No dead letter is to be put back.")
        yield from check_results(expanded(ingest, {}), {}, (), again=True)
        return
    counts = done.scanned.counts
    context.log.info(f"Put {counts['records']} dead letters back; {counts['dead']} failed again.")
    found = _changed(
        done.ingest, done.targets, lakehouse, lambda number, last: bool(done.scanned.rows(number) or last)
    )
    materialised = [dg.MaterializeResult[Any](asset_key=key, metadata=told) for _, key, told in found]
    names = [one.name for one in done.targets]
    checks = check_results(done.ingest, counts, names, again=True)
    yield from _declared_alone(context, ingest, [*materialised, *checks])


def _declared_alone(
    context: dg.AssetExecutionContext,
    ingest: Ingest,
    found: Sequence[dg.MaterializeResult[Any] | dg.AssetCheckResult],
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """What is of the step's own assets; of tables that records have named Dagster is told by events.

    They have no definition: what the code location is made of is settled before records are read.
    """
    declared = {*(one.asset for one in ingest.tables), ingest.dead_letters_asset}
    for one in found:
        if one.asset_key in declared:
            yield one
        elif isinstance(one, dg.AssetCheckResult):
            context.log_event(evaluation(one))
        else:
            assert one.asset_key is not None  # noqa: S101 - each of ours names its asset
            context.log_event(dg.AssetMaterialization(one.asset_key, metadata=dict(one.metadata or {})))


def asset_specs(ingest: Ingest, *, live: bool = True) -> Iterator[dg.AssetSpec]:
    """Each table's asset, made from the topics."""
    filled_live = {AssetMetadata.LIVE_INGESTION: ingest.name} if live else {}
    topics = [topic_key(ingest, topic) for topic in ingest.topics]
    for table in ingest.tables:
        if table.is_family:
            continue
        mode = _mode(table) | filled_live
        if table.contract is not None:
            mode |= column_metadata(table.contract)
        yield dg.AssetSpec(
            table.asset,
            deps=topics,
            description=_described(ingest, table, live=live),
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
        metadata=table_metadata(write_mode="append") | filled_live,
        skippable=True,
        kinds={"iceberg", _KINDS[ingest.source], "spark"},
        group_name=f"ingest_{ingest.name}",
    )


def _described(ingest: Ingest, table: IngestTable, *, live: bool) -> str:
    """With the jobs: Dagster lists those of assets on their pages, and the live one is none."""
    what = table.description or f"Records of {', '.join(ingest.topics)}, ingested by {ingest.name}."
    name = f"ingest_{ingest.name}"
    or_live = f", or by the live run of `{name}_live`" if live else ""
    return f"{what}\n\nFilled by runs of `{name}_job`, one for each batch{or_live}."


def _mode(table: IngestTable) -> dict[str, Any]:
    return table_metadata(
        write_mode="append" if table.mode == "append" else "upsert",
        keys=table.keys,
        layout=table.layout,
        properties=table.properties,
    )


def _place(
    context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
) -> Place:
    run = lakehouse.run_branch
    opened = run.open() if run is not None else None
    origin = {
        LakeProperty.RUN_ID: context.run.run_id,
        LakeProperty.ROOT_RUN_ID: context.run.root_run_id or context.run.run_id,
        LakeProperty.STEP: str(context.op_execution_context.op_handle),
        LakeProperty.ATTEMPT: str(context.op_execution_context.retry_number + 1),
    }
    if opened is not None:
        origin[LakeProperty.BASE_HASH] = opened.base_hash
    return Place(
        lakehouse.lakehouse,
        lakehouse.open_branch(),
        lakehouse.own_catalog(),
        spark.own_session,
        context.run.run_id,
        origin,
        lakehouse.maker(),
    )


def _begin_anew(context: dg.AssetExecutionContext, ingest: Ingest, place: Place) -> None:
    """Forget what an earlier attempt of the step committed: in this run, or in the one that it retries."""
    base, settings = place.origin.get(LakeProperty.BASE_HASH), place.lake.settings
    if base is None:
        return
    known = known_tables(ingest, place.lake.nessie, place.catalog, settings.default_namespace)
    if take_back(
        place.lake.nessie,
        place.branch,
        base,
        known.wanted.values(),
        ingestion=ingest.name,
        properties=place.properties,
    ):
        context.log.warning("An earlier attempt had committed its batch. It was taken back.")


def _materialised(
    result: BatchResult, lakehouse: LakehouseResource, again: bool, *, known: Callable[[str], object]
) -> Iterator[dg.MaterializeResult[Any]]:
    """What became of the tables that the batch has changed; after a retry of all, for an attempt may have."""

    def changed(number: int, last: bool) -> bool:
        return bool(
            last or again or result.scanned.rows(number) or known(result.targets[number].name) is None
        )

    for number, key, told in _changed(result.ingest, result.targets, lakehouse, changed):
        yield dg.MaterializeResult(asset_key=key, metadata={**told, **table_metadata_of(result, number)})


def _changed(
    ingest: Expanded,
    targets: Sequence[Target],
    lakehouse: LakehouseResource,
    changed: Callable[[int, bool], bool],
) -> Iterator[tuple[int, dg.AssetKey, dict[str, Any]]]:
    """Number, asset and metadata of the changed tables; `changed` gets a number, and if it is the last."""
    catalog, settings = lakehouse.own_catalog(), lakehouse.lakehouse.settings
    keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
    modes = [*(_mode(table) for table in ingest.tables), table_metadata(write_mode="append")]
    for number, (key, mode, target) in enumerate(zip(keys, modes, targets, strict=True)):
        if changed(number, number == len(keys) - 1):
            table = catalog.load_table(target.identifier)
            spec = table_spec(key, mode, default_namespace=settings.default_namespace, partitioned=False)
            yield (
                number,
                key,
                materialisation_metadata(table, spec, lakehouse.run_branch, partition_rows=None),
            )
