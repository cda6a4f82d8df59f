"""How soon a backlog of finished runs of one table is visible, as a night without the daemon leaves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

import dagster as dg
import pyarrow as pa
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.history.summary import RUN_ID
from branchlake_dagster.internals.dagster import StepMaterializationData
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.outcome import Outcome, PublicationAction
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.provenance import BRANCH_HEAD
from branchlake_dagster.runs.run_branch import branch_name
from branchlake_dagster.runs.run_tags import Place, opened
from branchlake_dagster.tables import arrow_frames
from branchlake_dagster.tables.replaced_rows import replaced as predicate_of
from branchlake_dagster.tables.replaced_rows import to_text
from branchlake_dagster.tables.selection import select
from branchlake_dagster.tables.specification import table_metadata, table_spec

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
            asset.key, metadata={"rows": 1, BRANCH_HEAD: head}, partition=partition
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
        options = {f"{COMMIT_PROPERTY}{RUN_ID}": run_id}
        table = self.lake.catalog(branch, properties=options).load_table(self.spec.identifier)
        how = {"branchlake.write_mode": self.spec.write_mode, RUN_ID: run_id}
        selection = None
        if self.asset.partitions_def is not None:
            one = dg.StaticPartitionsDefinition([token])
            columns = self.spec.columns_by_dimension
            selection = select([token], one, columns, schema=_SCHEMA, table=self.spec.name)
            how["branchlake.replaced"] = to_text(predicate_of(selection, _SCHEMA))
        arrow_frames.write(
            pa.table({"token": [token], "n": [1]}, schema=_ROWS), table, self.spec, selection, how
        )
