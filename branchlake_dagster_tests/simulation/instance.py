"""The part of a Dagster instance that reconciler, reaper and retries ask, in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Self

from dagster import DagsterRun, DagsterRunStatus, RunsFilter


@dataclass(frozen=True)
class Record:
    """What Dagster's RunRecord tells of a run."""

    storage_id: int
    dagster_run: DagsterRun
    create_timestamp: datetime
    update_timestamp: datetime
    start_time: float | None
    end_time: float | None


class SimulatedInstance:
    """Runs with their tags. `pause` stands for the time a query takes; what is read is a copy."""

    def __init__(self, *, now: Callable[[], datetime], pause: Callable[[], None] = lambda: None) -> None:
        self._now = now
        self._pause = pause
        self._records: dict[str, Record] = {}

    # -- what the simulation does ----------------------------------------------------------------------

    def add(self, run: DagsterRun) -> None:
        """A run is launched."""
        now = self._now()
        self._records[run.run_id] = Record(len(self._records) + 1, run, now, now, now.timestamp(), None)

    def end(self, run_id: str, status: DagsterRunStatus) -> None:
        """A run ends, if it was launched and has not ended."""
        record = self._records.get(run_id)
        if record is not None and not record.dagster_run.is_finished:
            self._store(record, record.dagster_run.with_status(status), end_time=self._now().timestamp())

    def knows(self, run_id: str) -> bool:
        """Whether the run was launched."""
        return run_id in self._records

    def look(self, run_id: str) -> DagsterRun:
        """A run as it is, without taking time."""
        return self._records[run_id].dagster_run

    def _store(self, record: Record, run: DagsterRun, end_time: float | None = None) -> None:
        self._records[run.run_id] = Record(
            record.storage_id,
            run,
            record.create_timestamp,
            self._now(),
            record.start_time,
            end_time or record.end_time,
        )

    # -- what Dagster's own class has ------------------------------------------------------------------

    def get_run_by_id(self, run_id: str) -> DagsterRun | None:
        self._pause()
        record = self._records.get(run_id)
        return record.dagster_run if record else None

    def get_run_record_by_id(self, run_id: str) -> Record | None:
        self._pause()
        return self._records.get(run_id)

    def get_run_records(self, filters: RunsFilter | None = None, **_: Any) -> Sequence[Record]:
        self._pause()
        found = [record for record in self._records.values() if _matches(record.dagster_run, filters)]
        return found[::-1]

    def get_runs(
        self, filters: RunsFilter | None = None, limit: int | None = None, **_: Any
    ) -> list[DagsterRun]:
        return [record.dagster_run for record in self.get_run_records(filters)][:limit]

    def get_run_ids(self, filters: RunsFilter | None = None, **_: Any) -> list[str]:
        return [run.run_id for run in self.get_runs(filters)]

    def add_run_tags(self, run_id: str, new_tags: Mapping[str, str]) -> None:
        self._pause()
        record = self._records[run_id]
        self._store(record, record.dagster_run.with_tags({**record.dagster_run.tags, **new_tags}))
        self._pause()

    def get_records_for_run(self, *_: Any, **__: Any) -> Any:
        """The simulation's runs write no events of their own."""
        self._pause()
        return SimpleNamespace(records=[], has_more=False)

    def report_run_failed(self, run: DagsterRun, message: str | None = None, **_: Any) -> None:
        """Dagster takes that of a run that has succeeded, too."""
        self._pause()
        record = self._records[run.run_id]
        failed = record.dagster_run.with_status(DagsterRunStatus.FAILURE)
        self._store(record, failed, end_time=self._now().timestamp())

    def report_engine_event(self, *_: Any, **__: Any) -> None:
        self._pause()

    @property
    def event_log_storage(self) -> Self:
        return self

    def store_event_batch(self, *_: Any) -> None:
        return


def _matches(run: DagsterRun, filters: RunsFilter | None) -> bool:
    if filters is None:
        return True
    if filters.run_ids is not None and run.run_id not in filters.run_ids:
        return False
    if filters.statuses and run.status not in filters.statuses:
        return False
    for name, wanted in filters.tags.items():
        values = [wanted] if isinstance(wanted, str) else wanted
        if run.tags.get(name) not in values:
            return False
    return True
