"""Runs of the code location's jobs in this process, each of them published."""

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
"""Dagster prints every event of an in-process run; the benchmark reports its own progress."""


@dataclass(frozen=True)
class PublishedRuns:
    """A lake, a Dagster instance, and the definitions whose jobs run."""

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
            job: the name of the job.
            assets: the assets of the job to compute. (default: all)
            partition: the partition of the run.
            ops: the configuration of the ops.
            tags: tags of the run.

        Raises:
            BenchFailed: the run was not published.

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
