"""How long one pass of the publication sensor takes over many branches of runs that are still at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import dagster as dg

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.run_branch import branch_name

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
