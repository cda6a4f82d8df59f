"""Workloads of `branchlake bench publication`: large writes, many branches, waiting runs, long histories."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import dagster as dg
import pyarrow as pa
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import SnapshotExpirer
from branchlake_dagster.internals.dagster import StepMaterializationData
from branchlake_dagster.internals.pyiceberg import open_transaction, write_metadata
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, Unchanged
from branchlake_dagster.publication.ledger import (
    Candidate,
    MainLog,
    Publication,
    Published,
    load_write_set,
    publication_properties,
)
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.stored_log import LOG_FOLDER, LogFile
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunLocation, RunState, build_opening_tags
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import EventMetadata, LakeProperty
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.replaced_rows import build_replaced_rows as predicate_of
from branchlake_dagster.tables.replaced_rows import to_json
from branchlake_dagster.tables.selection import select_partitions
from branchlake_dagster.tables.specification import parse_table_spec, table_metadata

_PLAIN_WRITE_S = 10.0
_ROUNDS = 3


def measure_overhead(lake: Lakehouse, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a write of about ten seconds on a branch and directly to `main`.

    `overhead_ratio` is the total time on a branch divided by the plain write, as medians of both. The plain
    write is a Spark job on `main` without Dagster. The total on a branch is the same Spark job, and all
    steps of branchlake: opening the branch, the gate, publication, announcement and clean-up.
    """
    rows = _calibrate_rows(lake, say)
    plain_s, branched_s, machinery_s = [], [], []
    for number in range(_ROUNDS):
        plain_s.append(_time_plain_write(lake, rows, f"plain_{number}"))
        write_s, added_s = _time_branch_write(lake, rows, f"branched_{number}")
        branched_s.append(write_s + added_s)
        machinery_s.append(added_s)
        say(
            f"round {number + 1}/{_ROUNDS}: {plain_s[-1]:.1f} s plain, {write_s:.1f} + {added_s:.2f} s on a"
            " branch"
        )
    plain_median, branched_median = statistics.median(plain_s), statistics.median(branched_s)
    return {
        "overhead_ratio": round(branched_median / plain_median, 3),
        "plain_write_s": round(plain_median, 2),
        "machinery_s": round(statistics.median(machinery_s), 3),
    }


def _build_frame(session: Any, rows: int) -> DataFrame:
    frame: DataFrame = session.range(rows).select("id", F.sha2(F.col("id").cast("string"), 256).alias("text"))
    return frame


def _calibrate_rows(lake: Lakehouse, say: Callable[[str], None]) -> int:
    """Return the number of rows whose plain write takes about ten seconds on this machine."""
    rows = 2_000_000
    _time_plain_write(lake, 100_000, "warm")
    elapsed_s = _time_plain_write(lake, rows, "calibration")
    row_count = int(rows * _PLAIN_WRITE_S / elapsed_s)
    say(f"writing {row_count:,} rows takes about {_PLAIN_WRITE_S:.0f} s")
    return row_count


def _time_plain_write(lake: Lakehouse, rows: int, name: str) -> float:
    session = lake.spark_session(MAIN)
    try:
        began = time.perf_counter()
        _build_frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        return time.perf_counter() - began
    finally:
        session.stop()


def _time_branch_write(lake: Lakehouse, rows: int, name: str) -> tuple[float, float]:
    """Return the seconds of the write on a branch, and the seconds of all other steps of branchlake."""
    durations: dict[str, float] = {}
    resource = LakehouseResource.from_settings(lake.settings)

    @dg.asset(key=["bench", name], metadata=table_metadata(require_checks=False))
    def written(lakehouse: LakehouseResource, spark: BranchSparkResource) -> None:
        began = time.perf_counter()
        lakehouse.open_branch()
        durations["open"] = time.perf_counter() - began
        session = spark.spark_session
        began = time.perf_counter()
        _build_frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        durations["write"] = time.perf_counter() - began

    definitions = dg.Definitions.merge(
        branchlake_definitions(lake.settings, lakehouse=resource),
        dg.Definitions(assets=[written], executor=dg.in_process_executor),
    )
    with dg.DagsterInstance.local_temp() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        run = job.execute_in_process(instance=instance)
        began = time.perf_counter()
        graph = definitions.get_repository_def().asset_graph
        outcome = Reconciler.from_lake(lake, instance, graph).reconcile_run(run.run_id)
        durations["settle"] = time.perf_counter() - began
        if outcome is None or outcome.state is not RunState.PUBLISHED:
            raise RuntimeError(f"A publication of the benchmark failed: {outcome}")
    return durations["write"], durations["open"] + durations["settle"]


_PASSES = 3


def measure_reconcile(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> float:
    """Measure a reconciler pass over `count` temporary run branches, in median seconds."""
    run_ids = [str(uuid4()) for _ in range(count)]
    main_hash = lake.nessie.reference(MAIN).hash

    def create(run_id: str) -> None:
        lake.nessie.create_branch(run_branch_name(run_id), from_ref=MAIN, from_hash=main_hash)

    def delete(run_id: str) -> None:
        lake.nessie.delete_branch(run_branch_name(run_id), expected_hash=main_hash)

    definitions = dg.Definitions()
    with dg.DagsterInstance.local_temp() as instance, ThreadPoolExecutor(4) as pool:
        for run_id in run_ids:
            instance.add_run(
                dg.DagsterRun(job_name="__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED)
            )
        list(pool.map(create, run_ids))
        say(f"{count:,} branches and runs are created.")
        reconciler = Reconciler.from_lake(lake, instance, definitions.get_repository_def().asset_graph)
        durations = []
        for _ in range(_PASSES):
            began = time.perf_counter()
            outcome_count = sum(1 for _ in reconciler.reconcile_branches())
            durations.append(time.perf_counter() - began)
            if outcome_count < count:
                raise RuntimeError(f"The reconciler saw only {outcome_count} of {count} branches.")
        list(pool.map(delete, run_ids))
    return sorted(durations)[_PASSES // 2]


_NAMESPACE = "waiting"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False), NestedField(2, "n", LongType()))
_ROWS = pa.schema({"token": pa.string(), "n": pa.int64()})
_BUDGET_S = 30.0


@dg.asset(key=[_NAMESPACE, "appended"], metadata=table_metadata(write_mode="append"))
def appended() -> None:
    """The table that runs append to."""


@dg.asset(
    key=[_NAMESPACE, "replaced"],
    partitions_def=dg.DynamicPartitionsDefinition(name="waiting"),
    metadata=table_metadata(partition_by="token"),
)
def replaced() -> None:
    """The table in which each run replaces its own partition of one row."""


def _build_passing_check(asset: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, metadata={"branchlake/scope": "rows"})
    def waiting_check() -> dg.AssetCheckResult:
        """A check that always passes."""
        return dg.AssetCheckResult(passed=True)

    return waiting_check


def measure_waiting_runs(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> dict[str, float]:
    """Measure the seconds until the first and the last of `count` runs are visible, and the longest pass.

    All runs started from the same `main`, appended a row to the same table and passed a check. Passes
    follow each other like ticks of the sensor, but without Dagster's pause of five seconds.
    """
    first, elapsed_s, longest = _time_waiting_runs(lake, appended, count, say=say)
    return {
        f"waiting_{count}_first_s": round(first, 2),
        f"waiting_{count}_s": round(elapsed_s, 1),
        "waiting_longest_pass_s": round(longest, 1),
    }


def measure_replaced_runs(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> dict[str, float]:
    """Measure the seconds until `count` runs are visible that each replaced a partition of one table."""
    _, elapsed_s, _ = _time_waiting_runs(lake, replaced, count, say=say)
    return {f"waiting_replaced_{count}_s": round(elapsed_s, 1)}


def _time_waiting_runs(
    lake: Lakehouse, asset: dg.AssetsDefinition, count: int, *, say: Callable[[str], None]
) -> tuple[float, float, float]:
    runs = _FinishedRuns(lake, asset, count)
    base = lake.nessie.reference(MAIN).hash
    definitions = dg.Definitions(assets=[asset], asset_checks=[_build_passing_check(asset)])
    with dg.DagsterInstance.local_temp() as instance:
        for token in runs.tokens:
            runs.add_run(instance, base, token)
        say(f"{count:,} runs wait for publication.")
        reconciler = Reconciler.from_lake(lake, instance, definitions.get_repository_def().asset_graph)
        first = 0.0
        published = 0
        passes: list[float] = []
        began = time.perf_counter()
        while published < count:
            start, before = time.perf_counter(), published
            outcome: Outcome | None = None
            for outcome in reconciler.reconcile_branches(budget_s=_BUDGET_S):
                if outcome.state is RunState.PUBLISHED:
                    first = first or time.perf_counter() - began
                    published += 1
            passes.append(time.perf_counter() - start)
            if published == before:
                raise RuntimeError(f"None of {count - published} waiting runs was published: {outcome}")
        elapsed_s = time.perf_counter() - began
    rows = lake.catalog().load_table((_NAMESPACE, runs.spec.identifier[-1])).scan().to_arrow()
    if sorted(rows["token"].to_pylist()) != sorted(runs.tokens) or set(rows["n"].to_pylist()) != {1}:
        raise RuntimeError(f"{count} runs left {len(rows)} rows of {len(set(rows['token'].to_pylist()))}.")
    return first, elapsed_s, max(passes)


class _FinishedRuns:
    """Finished runs in Dagster and in the lake, each of which wrote its own token."""

    def __init__(self, lake: Lakehouse, asset: dg.AssetsDefinition, count: int) -> None:
        self.lake, self.asset = lake, asset
        self.tokens = [str(uuid4()) for _ in range(count)]
        self.spec = parse_table_spec(
            asset.key,
            asset.metadata_by_key[asset.key],
            default_namespace=_NAMESPACE,
            partitioned=asset.partitions_def is not None,
        )
        catalog = lake.catalog()
        catalog.create_namespace_if_not_exists((_NAMESPACE,))
        spec = UNPARTITIONED_PARTITION_SPEC
        if asset.partitions_def is not None:
            spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "token"))
        table = catalog.create_table(self.spec.identifier, _SCHEMA, partition_spec=spec)
        if asset.partitions_def is not None:
            table.append(pa.table({"token": self.tokens, "n": [0] * count}, schema=_ROWS))

    def add_run(self, instance: dg.DagsterInstance, base: str, token: str) -> None:
        """Add a finished run that wrote a token on its branch and passed its check."""
        run_id, asset = str(uuid4()), self.asset
        run_branch = run_branch_name(run_id)
        self.lake.nessie.create_branch(run_branch, from_ref=MAIN, from_hash=base)
        self._write_token(run_branch, run_id, token)
        tags = build_opening_tags(run_id, RunLocation(run_branch, base), {})
        if asset.partitions_def is not None:
            tags["dagster/partition"] = token
        instance.add_run(
            dg.DagsterRun("__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED, tags=tags)
        )
        partition = token if asset.partitions_def is not None else None
        branch_hash = self.lake.nessie.reference(run_branch).hash
        materialization = dg.AssetMaterialization(
            asset.key, metadata={"rows": 1, EventMetadata.BRANCH_HEAD: branch_hash}, partition=partition
        )
        event_data = StepMaterializationData(materialization)
        evaluation = dg.AssetCheckEvaluation(asset.key, "waiting_check", passed=True, partition=partition)
        for kind, data, step in (
            (dg.DagsterEventType.ASSET_MATERIALIZATION, event_data, "write"),
            (dg.DagsterEventType.ASSET_CHECK_EVALUATION, evaluation, "check"),
            (dg.DagsterEventType.RUN_SUCCESS, None, None),
        ):
            event = dg.DagsterEvent(kind.value, "__ASSET_JOB", event_specific_data=data, step_key=step)
            instance.report_dagster_event(event, run_id)

    def _write_token(self, branch: str, run_id: str, token: str) -> None:
        catalog_properties = {f"{COMMIT_PROPERTY}{LakeProperty.RUN_ID}": run_id}
        table = self.lake.catalog(branch, properties=catalog_properties).load_table(self.spec.identifier)
        snapshot_properties = {"branchlake.write_mode": self.spec.write_mode, LakeProperty.RUN_ID: run_id}
        selection = None
        if self.asset.partitions_def is not None:
            token_partition = dg.StaticPartitionsDefinition([token])
            columns = self.spec.columns_by_dimension
            selection = select_partitions(
                [token], token_partition, columns, schema=_SCHEMA, table_name=self.spec.name
            )
            snapshot_properties["branchlake.replaced"] = to_json(predicate_of(selection, _SCHEMA))
        arrow_frames.write_frame(
            pa.table({"token": [token], "n": [1]}, schema=_ROWS),
            table,
            self.spec,
            selection,
            snapshot_properties,
        )


_HISTORY_NAMESPACE = "history"
_HISTORY_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False))


def measure_rebase_ms(lake: Lakehouse, snapshots: int) -> float:
    """Measure the rebase of an append to a table with `snapshots` snapshots, in median milliseconds."""
    _create_long_history(lake, f"t{snapshots}", snapshots)
    return _time_rebases(lake, f"t{snapshots}")


def measure_expired_rebase_ms(lake: Lakehouse, snapshots: int) -> float:
    """Expire all but 100 snapshots of the table of `measure_rebase_ms`, and measure the rebase again."""
    expirer = SnapshotExpirer.of_lake(lake)
    policy = ExpiryPolicy(keep_age=timedelta(0), undo_age=timedelta(0))  # the snapshots are all new
    result = expirer.run(expirer.plan([f"{_HISTORY_NAMESPACE}.t{snapshots}"], policy))
    if [table.kept_count for table in result.tables] != [policy.keep_count]:
        raise RuntimeError(f"An expiry of the benchmark removed too little: {result}")
    return _time_rebases(lake, f"t{snapshots}")


def measure_long_expiry(lake: Lakehouse, snapshots: int) -> dict[str, float]:
    """Expire all but 100 snapshots of a table while a writer appends to it again and again.

    Each snapshot has 1.6 kB of metadata. Returns the seconds of plan and commit, the size of the metadata
    before, and the number of appends meanwhile. Raises RuntimeError if an append was lost.
    """
    name = f"long{snapshots}"
    identifier = (_HISTORY_NAMESPACE, name)
    _create_long_history(lake, name, snapshots, {"padding": "x" * 1_000})
    finished = threading.Event()

    def append_until_finished() -> int:
        count = 0
        while not finished.is_set() or not count:
            with open_transaction(lake.catalog().load_table(identifier)) as transaction:
                transaction.append(pa.table({"token": [str(uuid.uuid4())]}))
            count += 1
        return count

    expirer = SnapshotExpirer.of_lake(lake)
    policy = ExpiryPolicy(keep_age=timedelta(0), undo_age=timedelta(0))  # the snapshots are all new
    with ThreadPoolExecutor(1) as pool:
        appended = pool.submit(append_until_finished)
        try:
            began = time.perf_counter()
            result = expirer.run(expirer.plan([f"{_HISTORY_NAMESPACE}.{name}"], policy))
            elapsed_s = time.perf_counter() - began
        finally:
            finished.set()
    (expired_table,) = result.tables
    row_count = lake.catalog().load_table(identifier).scan().count()
    if expired_table.kept_count > policy.keep_count or row_count != appended.result() + 1:
        raise RuntimeError(f"An expiry of the benchmark removed too little or too much: {result}")
    return {
        "expire_70k_snapshots_s": round(elapsed_s, 2),
        "expire_70k_metadata_mb": round(expired_table.bytes_before / 1e6),
        "expire_70k_appends": appended.result(),
    }


def measure_publish_ms(lake: Lakehouse, snapshots: int, rounds: int) -> float:
    """Measure the publication of an append without a rebase, in median milliseconds of `rounds` publications.

    The table is that of an earlier call of `measure_rebase_ms` with the same number of snapshots.
    """
    return _time_publications(lake, f"t{snapshots}", (), rounds)


def _time_rebases(lake: Lakehouse, name: str) -> float:
    return _time_publications(lake, name, (MAIN,), _ROUNDS)


def _time_publications(lake: Lakehouse, name: str, others: Sequence[str], rounds: int) -> float:
    """Time publications of runs that appended a row. A row is also appended to each branch of `others`."""
    identifier = (_HISTORY_NAMESPACE, name)
    durations = []
    for _ in range(rounds):
        base, run_id = lake.nessie.reference(MAIN).hash, str(uuid.uuid4())
        branch = run_branch_name(run_id)
        lake.nessie.create_branch(branch, from_ref=MAIN, from_hash=base)
        for ref in (branch, *others):
            _append_row(lake.catalog(ref).load_table(identifier), run_id)
        head = lake.nessie.reference(branch)
        changes = load_write_set(lake.nessie, base, head)
        candidate = Candidate(branch, head.hash, base, run_id, run_id, "passed", changes)
        began = time.perf_counter()
        (result,) = build_publisher(lake).publish([candidate]).values()
        durations.append(1000 * (time.perf_counter() - began))
        if not isinstance(result, Published):
            raise RuntimeError(f"A publication of the benchmark failed: {result}")
        lake.nessie.delete_branch(branch, expected_hash=head.hash)
    return round(statistics.median(durations), 1)


def _append_row(table: Table, run_id: str, summary: Mapping[str, str] = MappingProxyType({})) -> None:
    snapshot_properties = {"branchlake.write_mode": "append", "branchlake.run_id": run_id, **summary}
    table.append(pa.table({"token": [str(uuid.uuid4())]}), snapshot_properties=snapshot_properties)


def _create_long_history(
    lake: Lakehouse, name: str, snapshots: int, summary: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Create a table whose metadata repeats its only snapshot many times, in a chain of parents.

    `summary` has additional entries of each snapshot's summary. Real commits would take an hour, because each
    commit writes all snapshots again.
    """
    catalog = lake.catalog()
    if not catalog.namespace_exists((_HISTORY_NAMESPACE,)):
        catalog.create_namespace((_HISTORY_NAMESPACE,))
    table = catalog.create_table((_HISTORY_NAMESPACE, "made"), _HISTORY_SCHEMA)
    _append_row(table, "history", summary)
    location = table.metadata_location.replace(".metadata.json", f"-{snapshots}.metadata.json")
    write_metadata(catalog, _repeat_snapshot(table.metadata, snapshots), table.io, location)
    catalog.drop_table((_HISTORY_NAMESPACE, "made"))
    catalog.register_table((_HISTORY_NAMESPACE, name), location)


def _repeat_snapshot(metadata: TableMetadata, count: int) -> TableMetadata:
    (last_snapshot,) = metadata.snapshots
    ids = [*range(1, count), last_snapshot.snapshot_id]
    parents = [None, *ids]
    chain = [
        last_snapshot.model_copy(
            update={"snapshot_id": snapshot_id, "parent_snapshot_id": parent, "sequence_number": number + 1}
        )
        for number, (snapshot_id, parent) in enumerate(zip(ids, parents, strict=False))
    ]
    entry = metadata.snapshot_log[-1]
    log = [entry.model_copy(update={"snapshot_id": snapshot_id}) for snapshot_id in ids]
    return metadata.model_copy(
        update={"snapshots": chain, "snapshot_log": log, "last_sequence_number": count}
    )


def measure_ledger_ms(
    lake: Lakehouse, commits: int, *, say: Callable[[str], None]
) -> tuple[float, float, float]:
    """Measure the look-up of a branch whose base is `commits` commits old.

    Returns milliseconds: of the first call of the first process on this machine, which reads the whole log;
    of the first call of a later process; and the median of all later calls.
    """
    client = lake.nessie
    base = head = client.reference(MAIN).hash
    (entry,) = [item for item in client.entries(MAIN) if item.key == ContentKey([_HISTORY_NAMESPACE])]
    for number in range(commits):
        publication = Publication(
            f"run-{uuid.uuid4()}", str(number), str(number), "passed", base, ("history.t",)
        )
        head = client.commit(
            MAIN,
            expected_hash=head,
            operations=[Unchanged(entry.key)],
            message="published",
            properties=publication_properties([publication]),
        ).hash
        if number % 10_000 == 9_999:
            say(f"{number + 1:,} of {commits:,} commits are created.")
    file = LogFile(lake.settings.state_dir / LOG_FOLDER / "bench_main_log")
    durations = []
    for log in (MainLog(file=file), *[MainLog(file=file)] * 20):
        began = time.perf_counter()
        if log.find_publication(
            client, f"run-{uuid.uuid4()}", base_hash=base, main_hash=client.reference(MAIN).hash
        ):
            raise RuntimeError("The log of main contains a branch that was never published.")
        durations.append(1000 * (time.perf_counter() - began))
    return round(durations[0], 1), round(durations[1], 1), round(statistics.median(durations[2:]), 1)
