"""Run jobs of the code location in this process, and publish each run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster.bench.launched_run import BenchFailed
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.run_publication import publish

_QUIET: Mapping[str, Any] = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Run configuration that silences Dagster, which prints every event of an in-process run."""


@dataclass(frozen=True)
class PublishedRuns:
    """Runs jobs of `definitions` in the Dagster instance `instance`, with tables in `lake`."""

    lake: Lakehouse
    instance: dg.DagsterInstance
    definitions: dg.Definitions

    def run(
        self,
        job: str,
        assets: Sequence[dg.AssetKey] = (),
        *,
        partition: str | None = None,
        ops: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> float:
        """Run a job, publish its run, and return the seconds from the start to the publication.

        Args:
            job: The name of the job.
            assets: The assets of the job to compute. (default: all)
            partition: The partition of the run.
            ops: The configuration of the ops.
            tags: The tags of the run.

        Raises:
            BenchFailed: The run was not published.
        """
        began = time.perf_counter()
        done = self.definitions.resolve_job_def(job).execute_in_process(
            instance=self.instance,
            asset_selection=list(assets) or None,
            partition_key=partition,
            run_config={**_QUIET, "ops": dict(ops or {})},
            tags=dict(tags or {}),
            raise_on_error=False,
        )
        outcome = publish(done, self.definitions, instance=self.instance, lakehouse=self.lake)
        if not outcome.published:
            failures = [event.message for event in done.all_events if event.is_step_failure]
            raise BenchFailed(f"{job} was not published: {failures or outcome}", run_id=done.run_id)
        return time.perf_counter() - began

    def table(self, key: dg.AssetKey, columns: Sequence[str] = ("*",)) -> pl.DataFrame:
        """Return the rows of a published table."""
        scan = self.lake.catalog(MAIN).load_table(tuple(key.path)).scan(selected_fields=tuple(columns))
        return pl.DataFrame(scan.to_arrow())

    def count_rows(self, key: dg.AssetKey) -> int:
        """Return the number of rows of a published table, from its metadata."""
        snapshot = self.lake.catalog(MAIN).load_table(tuple(key.path)).current_snapshot()
        summary = snapshot.summary if snapshot is not None else None
        return int(summary["total-records"] or 0) if summary is not None else 0
