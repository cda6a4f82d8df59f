"""Workloads of `branchlake bench publication`: single tables, waiting runs, many branches, long histories."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from branchlake_dagster.internals.dagster import StepMaterializationData
from branchlake_dagster.internals.pyiceberg import write_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, Unchanged
from branchlake_dagster.publication.definitions import branchlake_definitions
from branchlake_dagster.publication.ledger import Candidate, Publication, Published, properties, write_set
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import branch_name
from branchlake_dagster.runs.run_tags import Place, opened
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import EventMetadata, LakeProperty
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.replaced_rows import replaced as predicate_of
from branchlake_dagster.tables.replaced_rows import to_text
from branchlake_dagster.tables.selection import select
from branchlake_dagster.tables.specification import table_metadata, table_spec

_SECONDS = 10.0
_ROUNDS = 3


def overhead(lake: Lakehouse, *, say: Callable[[str], None]) -> dict[str, Any]:
    """`overhead_ratio`: total on a branch over the plain write of about ten seconds, medians of both.

    The plain write is Spark's own on `main`, without Dagster. On the branch it is the same Spark job; added
    to it is what the machinery took: opening the branch, gate, publication, announcement and clean-up.
    """
    rows = _calibrated(lake, say)
    plain, branched, machinery = [], [], []
    for number in range(_ROUNDS):
        plain.append(_plain(lake, rows, f"plain_{number}"))
        write, added = _on_a_branch(lake, rows, f"branched_{number}")
        branched.append(write + added)
        machinery.append(added)
        say(f"round {number + 1}/{_ROUNDS}: {plain[-1]:.1f} s plain, {write:.1f} + {added:.2f} s on a branch")
    base, total = statistics.median(plain), statistics.median(branched)
    return {
        "overhead_ratio": round(total / base, 3),
        "plain_write_s": round(base, 2),
        "machinery_s": round(statistics.median(machinery), 3),
    }


def _frame(session: Any, rows: int) -> DataFrame:
    frame: DataFrame = session.range(rows).select("id", F.sha2(F.col("id").cast("string"), 256).alias("text"))
    return frame


def _calibrated(lake: Lakehouse, say: Callable[[str], None]) -> int:
    """How many rows take about ten seconds here."""
    rows = 2_000_000
    _plain(lake, 100_000, "warm")
    took = _plain(lake, rows, "calibration")
    wanted = int(rows * _SECONDS / took)
    say(f"{wanted:,} rows take about {_SECONDS:.0f} s")
    return wanted


def _plain(lake: Lakehouse, rows: int, name: str) -> float:
    session = lake.spark_session(MAIN)
    try:
        began = time.perf_counter()
        _frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        return time.perf_counter() - began
    finally:
        session.stop()


def _on_a_branch(lake: Lakehouse, rows: int, name: str) -> tuple[float, float]:
    """Seconds of the write itself and of all else the machinery did for it."""
    took: dict[str, float] = {}
    resource = LakehouseResource.of(lake.settings)

    @dg.asset(key=["bench", name], metadata=table_metadata(require_checks=False))
    def written(lakehouse: LakehouseResource, spark: BranchSparkResource) -> None:
        began = time.perf_counter()
        lakehouse.open_branch()
        took["open"] = time.perf_counter() - began
        session = spark.spark_session
        began = time.perf_counter()
        _frame(session, rows).writeTo(f"nessie.bench.{name}").create()
        took["write"] = time.perf_counter() - began

    definitions = dg.Definitions.merge(
        branchlake_definitions(lake.settings, lakehouse=resource),
        dg.Definitions(assets=[written], executor=dg.in_process_executor),
    )
    with dg.DagsterInstance.local_temp() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        run = job.execute_in_process(instance=instance)
        began = time.perf_counter()
        graph = definitions.get_repository_def().asset_graph
        outcome = Reconciler.of(lake, instance, graph).run_one(run.run_id)
        took["settle"] = time.perf_counter() - began
        if outcome is None or outcome.action is not PublicationAction.PUBLISHED:
            raise RuntimeError(f"A benchmark's publication failed: {outcome}")
    return took["write"], took["open"] + took["settle"]


_PASSES = 3


def reconcile_seconds(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> float:
    """The median of some passes over `count` run branches. The branches are deleted afterwards."""
    run_ids = [str(uuid4()) for _ in range(count)]
    head = lake.nessie.reference(MAIN).hash

    def create(run_id: str) -> None:
        lake.nessie.create_branch(branch_name(run_id), from_ref=MAIN, from_hash=head)

    def delete(run_id: str) -> None:
        lake.nessie.delete_branch(branch_name(run_id), expected_hash=head)

    definitions = dg.Definitions()
    with dg.DagsterInstance.local_temp() as instance, ThreadPoolExecutor(4) as pool:
        for run_id in run_ids:
            instance.add_run(
                dg.DagsterRun(job_name="__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED)
            )
        list(pool.map(create, run_ids))
        say(f"{count:,} branches and runs are made.")
        reconciler = Reconciler.of(lake, instance, definitions.get_repository_def().asset_graph)
        took = []
        for _ in range(_PASSES):
            began = time.perf_counter()
            seen = sum(1 for _ in reconciler.run())
            took.append(time.perf_counter() - began)
            if seen < count:
                raise RuntimeError(f"Only {seen} of {count} branches were seen.")
        list(pool.map(delete, run_ids))
    return sorted(took)[_PASSES // 2]


_NAMESPACE = "waiting"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False), NestedField(2, "n", LongType()))
_ROWS = pa.schema({"token": pa.string(), "n": pa.int64()})
_BUDGET_S = 30.0


@dg.asset(key=[_NAMESPACE, "appended"], metadata=table_metadata(write_mode="append"))
def appended() -> None:
    """What runs have appended to."""


@dg.asset(
    key=[_NAMESPACE, "replaced"],
    partitions_def=dg.DynamicPartitionsDefinition(name="waiting"),
    metadata=table_metadata(partition_by="token"),
)
def replaced() -> None:
    """What runs have replaced, each a partition of its own that holds a row already."""


def _passing(asset: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, metadata={"branchlake/scope": "rows"})
    def waiting_check() -> dg.AssetCheckResult:
        """Passes."""
        return dg.AssetCheckResult(passed=True)

    return waiting_check


def waiting_seconds(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds until the first and the last of `count` finished runs is visible, and the longest pass.

    All of them have started from one `main`, have appended a row to one table and have passed a check. The
    passes follow each other as the sensor's ticks do, without Dagster's pause of five seconds between them.
    """
    first, took, longest = _seconds(lake, appended, count, say=say)
    return {
        f"waiting_{count}_first_s": round(first, 2),
        f"waiting_{count}_s": round(took, 1),
        "waiting_longest_pass_s": round(longest, 1),
    }


def waiting_replaced_seconds(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> dict[str, float]:
    """The same for runs that have each replaced a partition of one table, as a backfill leaves them."""
    _, took, _ = _seconds(lake, replaced, count, say=say)
    return {f"waiting_replaced_{count}_s": round(took, 1)}


def _seconds(
    lake: Lakehouse, asset: dg.AssetsDefinition, count: int, *, say: Callable[[str], None]
) -> tuple[float, float, float]:
    runs = _Runs(lake, asset, count)
    base = lake.nessie.reference(MAIN).hash
    definitions = dg.Definitions(assets=[asset], asset_checks=[_passing(asset)])
    with dg.DagsterInstance.local_temp() as instance:
        for token in runs.tokens:
            runs.finish(instance, base, token)
        say(f"{count:,} runs wait.")
        reconciler = Reconciler.of(lake, instance, definitions.get_repository_def().asset_graph)
        first = 0.0
        published = 0
        passes: list[float] = []
        began = time.perf_counter()
        while published < count:
            start, before = time.perf_counter(), published
            outcome: Outcome | None = None
            for outcome in reconciler.run(budget_s=_BUDGET_S):
                if outcome.action is PublicationAction.PUBLISHED:
                    first = first or time.perf_counter() - began
                    published += 1
            passes.append(time.perf_counter() - start)
            if published == before:
                raise RuntimeError(f"None of {count - published} waiting runs was published: {outcome}")
        took = time.perf_counter() - began
    rows = lake.catalog().load_table((_NAMESPACE, runs.spec.identifier[-1])).scan().to_arrow()
    if sorted(rows["token"].to_pylist()) != sorted(runs.tokens) or set(rows["n"].to_pylist()) != {1}:
        raise RuntimeError(f"{count} runs left {len(rows)} rows of {len(set(rows['token'].to_pylist()))}.")
    return first, took, max(passes)


class _Runs:
    """Finished runs as Dagster and the lake would have them, and the tokens that they write: one each."""

    def __init__(self, lake: Lakehouse, asset: dg.AssetsDefinition, count: int) -> None:
        self.lake, self.asset = lake, asset
        self.tokens = [str(uuid4()) for _ in range(count)]
        self.spec = table_spec(
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

    def finish(self, instance: dg.DagsterInstance, base: str, token: str) -> None:
        """A run that has written a token."""
        run_id, asset = str(uuid4()), self.asset
        name = branch_name(run_id)
        self.lake.nessie.create_branch(name, from_ref=MAIN, from_hash=base)
        self._write(name, run_id, token)
        tags = opened(run_id, Place(name, base), {})
        if asset.partitions_def is not None:
            tags["dagster/partition"] = token
        instance.add_run(
            dg.DagsterRun("__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED, tags=tags)
        )
        partition = token if asset.partitions_def is not None else None
        head = self.lake.nessie.reference(name).hash
        written = dg.AssetMaterialization(
            asset.key, metadata={"rows": 1, EventMetadata.BRANCH_HEAD: head}, partition=partition
        )
        materialised = StepMaterializationData(written)
        passed = dg.AssetCheckEvaluation(asset.key, "waiting_check", passed=True, partition=partition)
        for kind, data, step in (
            (dg.DagsterEventType.ASSET_MATERIALIZATION, materialised, "write"),
            (dg.DagsterEventType.ASSET_CHECK_EVALUATION, passed, "check"),
            (dg.DagsterEventType.RUN_SUCCESS, None, None),
        ):
            event = dg.DagsterEvent(kind.value, "__ASSET_JOB", event_specific_data=data, step_key=step)
            instance.report_dagster_event(event, run_id)

    def _write(self, branch: str, run_id: str, token: str) -> None:
        options = {f"{COMMIT_PROPERTY}{LakeProperty.RUN_ID}": run_id}
        table = self.lake.catalog(branch, properties=options).load_table(self.spec.identifier)
        how = {"branchlake.write_mode": self.spec.write_mode, LakeProperty.RUN_ID: run_id}
        selection = None
        if self.asset.partitions_def is not None:
            one = dg.StaticPartitionsDefinition([token])
            columns = self.spec.columns_by_dimension
            selection = select([token], one, columns, schema=_SCHEMA, table=self.spec.name)
            how["branchlake.replaced"] = to_text(predicate_of(selection, _SCHEMA))
        arrow_frames.write(
            pa.table({"token": [token], "n": [1]}, schema=_ROWS), table, self.spec, selection, how
        )


_HISTORY_NAMESPACE = "history"
_HISTORY_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False))


def rebase_ms(lake: Lakehouse, snapshots: int) -> float:
    """The median of rebasing a run's append on a table with a history of `snapshots`."""
    _table_with_history(lake, f"t{snapshots}", snapshots)
    identifier = (_HISTORY_NAMESPACE, f"t{snapshots}")
    took = []
    for _ in range(_ROUNDS):
        base, run_id = lake.nessie.reference(MAIN).hash, str(uuid.uuid4())
        name = branch_name(run_id)
        lake.nessie.create_branch(name, from_ref=MAIN, from_hash=base)
        for ref in (name, MAIN):
            _append(lake.catalog(ref).load_table(identifier), run_id)
        head = lake.nessie.reference(name)
        changes = write_set(lake.nessie, base, head)
        candidate = Candidate(name, head.hash, base, run_id, run_id, "passed", changes)
        began = time.perf_counter()
        (result,) = publisher_of(lake).publish([candidate]).values()
        took.append(1000 * (time.perf_counter() - began))
        if not isinstance(result, Published):
            raise RuntimeError(f"A benchmark's publication failed: {result}")
        lake.nessie.delete_branch(name, expected_hash=head.hash)
    return round(statistics.median(took), 1)


def _append(table: Table, run_id: str) -> None:
    told = {"branchlake.write_mode": "append", "branchlake.run_id": run_id}
    table.append(pa.table({"token": [str(uuid.uuid4())]}), snapshot_properties=told)


def _table_with_history(lake: Lakehouse, name: str, snapshots: int) -> None:
    """A table whose metadata names its one snapshot many times, in a chain of parents.

    Written one after the other they would take an hour, because every commit writes them all again.
    """
    catalog = lake.catalog()
    if not catalog.namespace_exists((_HISTORY_NAMESPACE,)):
        catalog.create_namespace((_HISTORY_NAMESPACE,))
    table = catalog.create_table((_HISTORY_NAMESPACE, "made"), _HISTORY_SCHEMA)
    _append(table, "history")
    location = table.metadata_location.replace(".metadata.json", f"-{snapshots}.metadata.json")
    write_metadata(catalog, _with_history(table.metadata, snapshots), table.io, location)
    catalog.drop_table((_HISTORY_NAMESPACE, "made"))
    catalog.register_table((_HISTORY_NAMESPACE, name), location)


def _with_history(metadata: TableMetadata, count: int) -> TableMetadata:
    (last,) = metadata.snapshots
    ids = [*range(1, count), last.snapshot_id]
    parents = [None, *ids]
    chain = [
        last.model_copy(
            update={"snapshot_id": one, "parent_snapshot_id": parent, "sequence_number": number + 1}
        )
        for number, (one, parent) in enumerate(zip(ids, parents, strict=False))
    ]
    entry = metadata.snapshot_log[-1]
    log = [entry.model_copy(update={"snapshot_id": one}) for one in ids]
    return metadata.model_copy(
        update={"snapshots": chain, "snapshot_log": log, "last_sequence_number": count}
    )


def ledger_ms(lake: Lakehouse, commits: int, *, say: Callable[[str], None]) -> tuple[float, float]:
    """Looking a branch up whose base is `commits` ago: the first one of a process, and every other one."""
    client = lake.nessie
    base = head = client.reference(MAIN).hash
    (entry,) = [one for one in client.entries(MAIN) if one.key == ContentKey([_HISTORY_NAMESPACE])]
    for number in range(commits):
        one = Publication(f"run-{uuid.uuid4()}", str(number), str(number), "passed", base, ("history.t",))
        head = client.commit(
            MAIN,
            expected_hash=head,
            operations=[Unchanged(entry.key)],
            message="published",
            properties=properties([one]),
        ).hash
        if number % 10_000 == 9_999:
            say(f"{number + 1:,} of {commits:,} commits are made.")
    log = MainLog()
    took = []
    for _ in range(20):
        began = time.perf_counter()
        if log.already_published(client, f"run-{uuid.uuid4()}", base=base, at=client.reference(MAIN).hash):
            raise RuntimeError("A branch was found that nobody has published.")
        took.append(1000 * (time.perf_counter() - began))
    return round(took[0], 1), round(statistics.median(took[1:]), 1)
