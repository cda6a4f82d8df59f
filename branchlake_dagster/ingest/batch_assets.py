"""Builds the multi-asset of an ingestion: each materialization writes one batch on the run's branch.

A retry of the step first undoes the earlier attempt, so that it starts from the base of the run's branch. An
attempt may have committed its batch although it failed: it failed before it reported the batch, or its
process died. A retry on top of that commit would report no check results for its dead letters and broken
contracts.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from branchlake_dagster.checks.asset_checks import column_metadata
from branchlake_dagster.ingest.batch_commit import list_staging_tables
from branchlake_dagster.ingest.batch_context import BatchContext, load_ingestion_tables, plan_next_batch
from branchlake_dagster.ingest.batch_report import (
    batch_table_metadata,
    build_ingest_check_specs,
    format_batch_summary,
    iter_check_results,
    to_check_evaluation,
    topic_key,
)
from branchlake_dagster.ingest.batch_tables import BatchTargets, Identifier
from branchlake_dagster.ingest.declaration import ExpandedIngest, Ingest, IngestTable, expand_families
from branchlake_dagster.ingest.ingest_batch import BatchResult, ingest_batch
from branchlake_dagster.ingest.raw_reprocessing import RawInterval, format_result, reprocess_raw
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, reprocess_batch
from branchlake_dagster.ingest.topic_source import open_topic_source
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, Operation, Put
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import materialization_metadata
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import AssetMetadata, LakeProperty, RunTag
from branchlake_dagster.tables.specification import parse_table_spec, table_metadata


def undo_earlier_attempt(
    client: NessieClient,
    branch: str,
    base_hash: str,
    tables: Iterable[Identifier],
    *,
    ingestion: str,
    properties: Mapping[str, str],
) -> bool:
    """Reset an ingestion's tables on a run's branch to the branch's base. Return whether they had changed.

    `base_hash` is the commit of `main` from which the branch was created. The reset is one commit, with
    `properties` as its properties in Nessie. Staging tables of earlier attempts are dropped. If a commit of
    the earlier attempt arrives later, Nessie refuses it, because this reset has changed the same tables.
    Nessie's errors pass through.
    """
    if client.reference(branch).hash == base_hash:
        return False
    identifiers = list(tables)
    keys = [ContentKey(one) for one in (*identifiers, *list_staging_tables(client, branch, identifiers))]
    current_contents = client.contents_at(branch, keys)
    base_contents = client.contents(f"{MAIN}@{base_hash}", keys)
    operations: list[Operation] = []
    for key in keys:
        base_content = base_contents.get(key)
        if base_content != current_contents.contents.get(key):
            operations.append(Put(key, base_content) if base_content is not None else Delete(key))
    if operations:
        client.commit(
            branch,
            expected_hash=current_contents.reference.hash,
            operations=operations,
            message=f"Ingest {ingestion}: an earlier attempt of the step is taken back",
            properties=properties,
        )
    return bool(operations)


ingests_by_name: dict[str, Ingest] = {}
"""The ingestions of the code locations that this process has loaded, by name."""

_KINDS = {"kafka": "kafka", "landing": "parquet"}


def count_read_tasks(lake: Lakehouse) -> int:
    """Return the number of Spark tasks that read a batch.

    It is the number of local cores (at least 2) with the embedded Spark, and 32 with a Spark cluster.
    """
    return max(2, os.cpu_count() or 2) if lake.settings.embedded_spark else 32


def build_batch_assets(ingest: Ingest, *, live: bool = True) -> dg.AssetsDefinition:
    """Build one multi-asset with the tables of an ingestion, its dead letters and its kept records.

    `live` states whether the ingestion also has a live run. The ingestion is added to `ingests_by_name`.
    """
    ingests_by_name[ingest.name] = ingest

    @dg.multi_asset(
        name=f"ingest_{ingest.name}",
        specs=list(build_asset_specs(ingest, live=live)),
        check_specs=build_ingest_check_specs(ingest),
        op_tags={RunTag.INGESTION: ingest.name},
    )
    def run_batch(
        context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
        lake = lakehouse.lakehouse
        if (selection_text := context.run.tags.get(RunTag.REPROCESS)) is not None:
            yield from _reprocess_dead_letters(
                ingest, context, lakehouse, spark, DeadLetterSelection.from_tag(selection_text)
            )
            return
        if (interval_text := context.run.tags.get(RunTag.REPROCESS_RAW)) is not None:
            yield from _reprocess_kept_records(
                ingest, context, lakehouse, spark, RawInterval.from_tag(interval_text)
            )
            return
        source, default_namespace = open_topic_source(ingest, lake.settings), lake.settings.default_namespace
        batch_context = _build_batch_context(context, lakehouse, spark)
        _restart_from_base(context, ingest, batch_context)
        planned_batch = plan_next_batch(
            ingest, lake.nessie, lakehouse.own_catalog(), source.topics, namespace=default_namespace
        )
        for note in planned_batch.plan.notes:
            context.log.warning(note)
        if planned_batch.plan.is_empty:
            context.log.info("The topics have no new records.")
            yield from iter_check_results(
                planned_batch.ingest, {}, planned_batch.ingestion_tables.declarations
            )
            return
        result = ingest_batch(planned_batch, batch_context, source.records, tasks=count_read_tasks(lake))
        for note in result.notes[len(planned_batch.plan.notes) :]:
            context.log.warning(note)
        context.log.info(format_batch_summary(result))
        is_retry = context.op_execution_context.retry_number > 0
        materializations = _iter_materializations(
            result, lakehouse, is_retry, find_table=planned_batch.loaded_tables.get
        )
        # A batch without records does not create a table that declares no columns, but reports its check.
        declarations = {**planned_batch.ingestion_tables.declarations, **result.targets.declarations}
        checks = iter_check_results(result.ingest, result.scan_result.counts, declarations)
        yield from _yield_declared_results(context, ingest, [*materializations, *checks])

    return run_batch


def _reprocess_dead_letters(
    ingest: Ingest,
    context: dg.AssetExecutionContext,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
    selection: DeadLetterSelection,
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """Reprocess the dead letters of `selection`; yield the step's materializations and check results.

    A materialization is yielded for each table of `ingest` that changed, and for the dead letters. If no
    selected dead letter waits, only check results are yielded. An earlier attempt of the step is undone
    first. `spark` opens the sessions on the run's branch.
    """
    batch_context = _build_batch_context(context, lakehouse, spark)
    _restart_from_base(context, ingest, batch_context)
    result = reprocess_batch(ingest, batch_context, selection)
    if result is None:
        context.log.info("No selected dead letter waits for reprocessing.")
        yield from iter_check_results(expand_families(ingest, {}), {}, {}, is_reprocessing=True)
        return
    counts = result.scanned.counts
    for note in result.notes:
        context.log.warning(note)
    context.log.info(f"Reprocessed {counts['records']} dead letters; {counts['dead']} failed again.")
    changed_assets = _iter_changed_assets(
        result.ingest,
        result.targets,
        lakehouse,
        lambda number, is_dead_letters: bool(result.scanned.count_rows(number) or is_dead_letters),
    )
    materializations = [
        dg.MaterializeResult[Any](asset_key=key, metadata=metadata) for _, key, metadata in changed_assets
    ]
    checks = iter_check_results(result.ingest, counts, result.targets.declarations, is_reprocessing=True)
    yield from _yield_declared_results(context, ingest, [*materializations, *checks])


def _reprocess_kept_records(
    ingest: Ingest,
    context: dg.AssetExecutionContext,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
    interval: RawInterval,
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """Decode the kept records of an interval again; yield the step's materializations and check results.

    A materialization is yielded for each table of `ingest` that changed. If the interval has no records to
    decode, only check results are yielded. `spark` opens the sessions on the run's branch.
    """
    batch_context = _build_batch_context(context, lakehouse, spark)
    _restart_from_base(context, ingest, batch_context)
    result = reprocess_raw(ingest, batch_context, interval, report=context.log.info)
    if result is None:
        context.log.info("No record of the interval is kept, or an earlier attempt decoded them.")
        yield from iter_check_results(expand_families(ingest, {}), {}, {})
        return
    context.log.info(format_result(result))
    changed_assets = _iter_changed_assets(
        result.ingest,
        result.targets,
        lakehouse,
        lambda number, _: result.targets[number].name in result.changed,
    )
    materializations = [
        dg.MaterializeResult[Any](asset_key=key, metadata=metadata) for _, key, metadata in changed_assets
    ]
    checks = iter_check_results(result.ingest, result.counts, result.targets.declarations)
    yield from _yield_declared_results(context, ingest, [*materializations, *checks])


def _yield_declared_results(
    context: dg.AssetExecutionContext,
    ingest: Ingest,
    results: Sequence[dg.MaterializeResult[Any] | dg.AssetCheckResult],
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetCheckResult]:
    """Yield the results of the step's declared assets, and log the results of all other tables as events.

    Tables that records have named have no asset definition: Dagster loads the definitions of a code location
    before any record is read, and rejects results of undeclared assets.
    """
    declared_keys = {*ingest.all_assets}
    for result in results:
        if result.asset_key in declared_keys:
            yield result
        elif isinstance(result, dg.AssetCheckResult):
            context.log_event(to_check_evaluation(result))
        else:
            assert result.asset_key is not None  # noqa: S101 - each of these results names its asset
            context.log_event(dg.AssetMaterialization(result.asset_key, metadata=dict(result.metadata or {})))


def build_asset_specs(ingest: Ingest, *, live: bool = True) -> Iterator[dg.AssetSpec]:
    """Yield the asset specifications of the tables, the dead letters and the kept records.

    Families are left out. The topics are the upstream assets. `live` states whether the ingestion also has
    a live run.
    """
    filled_live = {AssetMetadata.LIVE_INGESTION: ingest.name} if live else {}
    topics = [topic_key(ingest, topic) for topic in ingest.topics]
    for table in ingest.tables:
        if table.is_family:
            continue
        metadata = _write_metadata(table) | filled_live
        if table.contract is not None:
            metadata |= column_metadata(table.contract)
        yield dg.AssetSpec(
            table.asset,
            deps=topics,
            description=_format_description(ingest, table, live=live),
            metadata=metadata,
            skippable=True,
            kinds={"iceberg", _KINDS[ingest.source], "spark"},
            freshness_policy=table.freshness_policy,
            group_name=f"ingest_{ingest.name}",
        )
    yield dg.AssetSpec(
        ingest.dead_letters_asset,
        deps=topics,
        description=f"The unchanged records that ingestion {ingest.name} could not write into any table.",
        metadata=table_metadata(write_mode="append") | filled_live,
        skippable=True,
        kinds={"iceberg", _KINDS[ingest.source], "spark"},
        group_name=f"ingest_{ingest.name}",
    )
    if ingest.kept_records_asset is not None:
        yield dg.AssetSpec(
            ingest.kept_records_asset,
            deps=topics,
            description=f"The records of ingestion {ingest.name} as they were received, for"
            f" {ingest.keep_value_days} days. `branchlake reprocess --from-raw` decodes them again.",
            metadata=table_metadata(write_mode="append", require_checks=False) | filled_live,
            skippable=True,
            kinds={"iceberg", _KINDS[ingest.source], "spark"},
            group_name=f"ingest_{ingest.name}",
        )


def _format_description(ingest: Ingest, table: IngestTable, *, live: bool) -> str:
    """Return the description of a table's asset, with the job of the batches and, with `live`, the live job.

    Dagster's asset page does not list the live job, because it has an op and no assets.
    """
    summary = table.description or f"Records of {', '.join(ingest.topics)}, ingested by {ingest.name}."
    name = f"ingest_{ingest.name}"
    live_clause = f"; the live run of `{name}_live` adds batches continuously" if live else ""
    return f"{summary}\n\nEach run of `{name}_job` adds one batch{live_clause}."


def _write_metadata(table: IngestTable) -> dict[str, Any]:
    return table_metadata(
        write_mode="append" if table.mode == "append" else "upsert",
        keys=table.keys,
        layout=table.layout,
        properties=table.properties,
    )


def _build_batch_context(
    context: dg.AssetExecutionContext, lakehouse: LakehouseResource, spark: BranchSparkResource
) -> BatchContext:
    run_branch = lakehouse.run_branch
    opened_branch = run_branch.open() if run_branch is not None else None
    snapshot_properties = {
        LakeProperty.RUN_ID: context.run.run_id,
        LakeProperty.ROOT_RUN_ID: context.run.root_run_id or context.run.run_id,
        LakeProperty.STEP: str(context.op_execution_context.op_handle),
        LakeProperty.ATTEMPT: str(context.op_execution_context.retry_number + 1),
    }
    if opened_branch is not None:
        snapshot_properties[LakeProperty.BASE_HASH] = opened_branch.base_hash
    return BatchContext(
        lakehouse.lakehouse,
        lakehouse.open_branch(),
        lakehouse.own_catalog(),
        spark.own_session,
        context.run.run_id,
        snapshot_properties,
        lakehouse.maker_properties(),
    )


def _restart_from_base(
    context: dg.AssetExecutionContext, ingest: Ingest, batch_context: BatchContext
) -> None:
    """Reset the ingestion's tables on the run's branch if an earlier attempt of the step changed them.

    They are reset to the commit of `main` from which the branch started. The earlier attempt was in this run
    or in the run that it retries. Does nothing if the run has no branch.
    """
    base_hash, settings = (
        batch_context.snapshot_properties.get(LakeProperty.BASE_HASH),
        batch_context.lake.settings,
    )
    if base_hash is None:
        return
    ingestion_tables = load_ingestion_tables(
        ingest, batch_context.lake.nessie, batch_context.catalog, settings.default_namespace
    )
    if undo_earlier_attempt(
        batch_context.lake.nessie,
        batch_context.branch,
        base_hash,
        ingestion_tables.identifiers.values(),
        ingestion=ingest.name,
        properties=batch_context.commit_properties,
    ):
        context.log.warning("An earlier attempt of this step had committed its batch. The commit was undone.")


def _iter_materializations(
    result: BatchResult, lakehouse: LakehouseResource, is_retry: bool, *, find_table: Callable[[str], object]
) -> Iterator[dg.MaterializeResult[Any]]:
    """Yield a materialization for each table that the batch changed.

    With `is_retry` every table counts as changed, because the earlier attempt may have changed it.
    `find_table` returns the table of a dotted name as it was before the batch, or None for a new table.
    """

    def is_changed(number: int, is_dead_letters: bool) -> bool:
        return bool(
            is_dead_letters
            or is_retry
            or result.count_rows(number)
            or find_table(result.targets[number].name) is None
        )

    for number, key, metadata in _iter_changed_assets(result.ingest, result.targets, lakehouse, is_changed):
        yield dg.MaterializeResult(
            asset_key=key, metadata={**metadata, **batch_table_metadata(result, number)}
        )


def _iter_changed_assets(
    ingest: ExpandedIngest,
    targets: BatchTargets,
    lakehouse: LakehouseResource,
    is_changed: Callable[[int, bool], bool],
) -> Iterator[tuple[int, dg.AssetKey, dict[str, Any]]]:
    """Yield index, asset key and metadata of each changed table.

    `is_changed` is called with the table's index and whether it is the table of dead letters.
    """
    catalog, settings = lakehouse.own_catalog(), lakehouse.lakehouse.settings
    for number, (key, target) in enumerate(zip(ingest.all_assets, targets, strict=True)):
        if is_changed(number, number == targets.dead_letter_number):
            declaration = target.declaration
            write_metadata = (
                table_metadata(write_mode="append") if declaration is None else _write_metadata(declaration)
            )
            table = catalog.load_table(target.identifier)
            spec = parse_table_spec(
                key, write_metadata, default_namespace=settings.default_namespace, partitioned=False
            )
            yield (
                number,
                key,
                materialization_metadata(table, spec, lakehouse.run_branch, partition_rows=None),
            )
