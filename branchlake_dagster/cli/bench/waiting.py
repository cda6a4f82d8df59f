"""How soon a backlog of finished runs of one table is visible, as a night without the daemon leaves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

import dagster as dg
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.branching.branch.run_tags import Place, opened
from branchlake_dagster.branching.table.spec import table_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.library_internals.dagster import StepMaterializationData
from branchlake_dagster.publication.reconcile.outcome import PublicationAction
from branchlake_dagster.publication.reconcile.reconciler import Reconciler

_NAMESPACE, _TABLE = "waiting", "t"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False), NestedField(2, "n", LongType()))
_BUDGET_S = 30.0


@dg.asset(key=[_NAMESPACE, _TABLE], metadata=table_metadata(write_mode="append"))
def waiting_table() -> None:
    """What the runs have written."""


@dg.asset_check(asset=waiting_table, metadata={"branchlake/scope": "rows"})
def waiting_check() -> dg.AssetCheckResult:
    """Passes."""
    return dg.AssetCheckResult(passed=True)


def waiting_seconds(lake: Lakehouse, count: int, *, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds until the first and the last of `count` finished runs is visible, and the longest pass.

    All of them have started from one `main`, have appended a row to one table and have passed a check. The
    passes follow each other as the sensor's ticks do, without Dagster's pause of five seconds between them.
    """
    catalog = lake.catalog()
    catalog.create_namespace((_NAMESPACE,))
    catalog.create_table((_NAMESPACE, _TABLE), _SCHEMA)
    base = lake.nessie.reference(MAIN).hash
    definitions = dg.Definitions(assets=[waiting_table], asset_checks=[waiting_check])
    with dg.DagsterInstance.local_temp() as instance:
        tokens = [_finished(lake, instance, base) for _ in range(count)]
        say(f"{count:,} runs wait.")
        reconciler = Reconciler.of(lake, instance, definitions.get_repository_def().asset_graph)
        first = 0.0
        published = 0
        passes: list[float] = []
        began = time.perf_counter()
        while published < count:
            start, before = time.perf_counter(), published
            for outcome in reconciler.run(budget_s=_BUDGET_S):
                if outcome.action is PublicationAction.PUBLISHED:
                    first = first or time.perf_counter() - began
                    published += 1
            passes.append(time.perf_counter() - start)
            if published == before:
                raise RuntimeError(f"Nothing was published of {count - published} waiting runs.")
        took = time.perf_counter() - began
    rows = lake.catalog().load_table((_NAMESPACE, _TABLE)).scan().to_arrow()["token"].to_pylist()
    if sorted(rows) != sorted(tokens):
        raise RuntimeError(f"{count} runs left {len(rows)} rows, {len(set(rows))} of them different.")
    return {
        f"waiting_{count}_first_s": round(first, 2),
        f"waiting_{count}_s": round(took, 1),
        "waiting_longest_pass_s": round(max(passes), 1),
    }


def _finished(lake: Lakehouse, instance: dg.DagsterInstance, base: str) -> str:
    """A run as Dagster and the lake would have it; the token that it wrote."""
    run_id, token = str(uuid4()), str(uuid4())
    name = branch_name(run_id)
    lake.nessie.create_branch(name, from_ref=MAIN, from_hash=base)
    lake.catalog(name).load_table((_NAMESPACE, _TABLE)).append(
        pa.table({"token": [token], "n": pa.array([1], pa.int64())}),
        snapshot_properties={"branchlake.write_mode": "append", "branchlake.run_id": run_id},
    )
    tags = opened(run_id, Place(name, base), {})
    instance.add_run(
        dg.DagsterRun("__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED, tags=tags)
    )
    materialised = StepMaterializationData(dg.AssetMaterialization(waiting_table.key, metadata={"rows": 1}))
    passed = dg.AssetCheckEvaluation(waiting_table.key, "waiting_check", passed=True)
    for kind, data, step in (
        (dg.DagsterEventType.ASSET_MATERIALIZATION, materialised, "write"),
        (dg.DagsterEventType.ASSET_CHECK_EVALUATION, passed, "check"),
        (dg.DagsterEventType.RUN_SUCCESS, None, None),
    ):
        event = dg.DagsterEvent(kind.value, "__ASSET_JOB", event_specific_data=data, step_key=step)
        instance.report_dagster_event(event, run_id)
    return token
