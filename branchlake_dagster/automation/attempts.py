"""Find the runs that were launched for a state of a consumer's inputs, by their run keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

from dagster import DagsterInstance, RunRecord, RunsFilter

from branchlake_dagster.automation.launch_decision import (
    Attempt,
    AttemptHistory,
    LaunchOutcome,
    attempt_key,
    launch_outcome,
)
from branchlake_dagster.internals.dagster import RUN_KEY_TAG
from branchlake_dagster.runs.run_tags import NO_VALUE, find_publication, find_run_location
from branchlake_dagster.stored_names import RunTag

_CHUNK = 200
"""The largest number of run keys in one query."""


def iter_histories(instance: DagsterInstance, keys: Iterable[str], retries: int) -> Iterator[AttemptHistory]:
    """Yield the attempts for each state key, in the order of `keys`. Runs are read lazily, in chunks.

    A published run changes the state of its consumer. If a run with this state key was published and the
    state is the same again, `main` was set back: earlier attempts are ignored, and the state continues under
    a new key. At most `retries` retries of each state are read.
    """
    key_iterator = iter(keys)
    while chunk := [*islice(key_iterator, max(1, _CHUNK // (retries + 1)))]:
        histories_by_key: dict[str, AttemptHistory] = {}
        run_keys = {key: key for key in chunk}
        while run_keys:
            records = _load_newest_runs(
                instance, [name for key in run_keys.values() for name in _attempt_keys(key, retries)]
            )
            next_run_keys: dict[str, str] = {}
            for key, run_key in run_keys.items():
                attempts = [
                    (number, records[name])
                    for number, name in enumerate(_attempt_keys(run_key, retries))
                    if name in records
                ]
                publication_hash = next(
                    (commit_hash for _, record in attempts if (commit_hash := _find_publication(record))),
                    None,
                )
                if publication_hash:
                    next_run_keys[key] = f"{run_key}-{publication_hash[:16]}"
                else:
                    histories_by_key[key] = AttemptHistory(
                        run_key, tuple(to_attempt(*attempt) for attempt in attempts)
                    )
            run_keys = next_run_keys
        yield from (histories_by_key[key] for key in chunk)


def _attempt_keys(key: str, retries: int) -> list[str]:
    return [attempt_key(key, number) for number in range(retries + 1)]


def _load_newest_runs(instance: DagsterInstance, keys: Sequence[str]) -> dict[str, RunRecord]:
    """Return the newest run of each run key. A published run wins over newer ones that were not published.

    A key can have several runs, because a re-execution has the run key of its parent.
    """
    newest_records: dict[str, RunRecord] = {}
    for start in range(0, len(keys), _CHUNK):
        run_filter = RunsFilter(tags={RUN_KEY_TAG: [*keys[start : start + _CHUNK]]})
        for record in instance.get_run_records(run_filter):  # the newest first
            key = record.dagster_run.tags[RUN_KEY_TAG]
            if key not in newest_records or (
                _find_publication(record) and not _find_publication(newest_records[key])
            ):
                newest_records[key] = record
    return newest_records


def _find_publication(record: RunRecord) -> str | None:
    """Return the commit on `main` that published the run; None if it was not published."""
    run = record.dagster_run
    location = find_run_location(run.tags, run.run_id)
    return find_publication(run.tags, location.branch) if location is not None else None


def to_attempt(number: int, record: RunRecord) -> Attempt:
    """Return the outcome of a run that was launched as attempt `number`, counted from 0."""
    outcome = launch_outcome(record.dagster_run)
    ended_at = record.update_timestamp
    if record.end_time is not None and outcome is not LaunchOutcome.UNFINISHED:
        ended_at = datetime.fromtimestamp(record.end_time, UTC)
    elif ended_at.tzinfo is None:
        ended_at = ended_at.replace(tzinfo=UTC)
    reason = record.dagster_run.tags.get(RunTag.REASON, "")
    return Attempt(number, record.dagster_run.run_id, outcome, ended_at, "" if reason == NO_VALUE else reason)
