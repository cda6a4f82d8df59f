"""The runs that were launched for a state of a consumer's inputs, found by their run keys."""

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
"""Run keys in one query."""


def iter_histories(instance: DagsterInstance, keys: Iterable[str], retries: int) -> Iterator[AttemptHistory]:
    """The attempts for each state, by its key and in the order of `keys`; reads runs as it is asked on.

    A published run has changed the state. Where the state is the same, `main` was set back since: the runs
    before that count for nothing, and the state goes on under a key of its own. At most `retries` retries of
    each state are looked at.
    """
    key_iterator = iter(keys)
    while chunk := [*islice(key_iterator, max(1, _CHUNK // (retries + 1)))]:
        histories_by_key: dict[str, AttemptHistory] = {}
        run_keys = {key: key for key in chunk}
        while run_keys:
            records = _load_newest_runs(
                instance, [one for key in run_keys.values() for one in _attempt_keys(key, retries)]
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
                        run_key, tuple(to_attempt(*one) for one in attempts)
                    )
            run_keys = next_run_keys
        yield from (histories_by_key[key] for key in chunk)


def _attempt_keys(key: str, retries: int) -> list[str]:
    return [attempt_key(key, number) for number in range(retries + 1)]


def _load_newest_runs(instance: DagsterInstance, keys: Sequence[str]) -> dict[str, RunRecord]:
    """By run key the newest run, or one that was published: a re-execution has the key of its parent."""
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
    """The commit on `main` as which the run was published; None if it was not."""
    run = record.dagster_run
    location = find_run_location(run.tags, run.run_id)
    return find_publication(run.tags, location.branch) if location is not None else None


def to_attempt(number: int, record: RunRecord) -> Attempt:
    """What became of a run that was launched as attempt `number`, counted from 0."""
    outcome = launch_outcome(record.dagster_run)
    ended_at = record.update_timestamp
    if record.end_time is not None and outcome is not LaunchOutcome.UNFINISHED:
        ended_at = datetime.fromtimestamp(record.end_time, UTC)
    elif ended_at.tzinfo is None:
        ended_at = ended_at.replace(tzinfo=UTC)
    reason = record.dagster_run.tags.get(RunTag.REASON, "")
    return Attempt(number, record.dagster_run.run_id, outcome, ended_at, "" if reason == NO_VALUE else reason)
