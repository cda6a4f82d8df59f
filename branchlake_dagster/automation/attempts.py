"""The runs that were launched for a state of a consumer's inputs, found by their run keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

from dagster import DagsterInstance, RunRecord, RunsFilter

from branchlake_dagster.automation.launch_decision import Attempt, History, Outcome, outcome_of, retry_key
from branchlake_dagster.internals.dagster import RUN_KEY_TAG
from branchlake_dagster.runs.run_tags import NONE, place_of, publication_of
from branchlake_dagster.stored_names import RunTag

_CHUNK = 200
"""Run keys in one query."""


def histories(instance: DagsterInstance, keys: Iterable[str], retries: int) -> Iterator[History]:
    """The attempts for each state, by its key and in the order of `keys`; reads runs as it is asked on.

    A published run has changed the state. Where the state is the same, `main` was set back since: the runs
    before that count for nothing, and the state goes on under a key of its own. At most `retries` retries of
    each state are looked at.
    """
    rest = iter(keys)
    while part := [*islice(rest, max(1, _CHUNK // (retries + 1)))]:
        found: dict[str, History] = {}
        current = {key: key for key in part}
        while current:
            records = _newest(instance, [one for key in current.values() for one in _keys(key, retries)])
            following: dict[str, str] = {}
            for key, now in current.items():
                attempts = [
                    (number, records[name])
                    for number, name in enumerate(_keys(now, retries))
                    if name in records
                ]
                published = next((one for _, record in attempts if (one := _publication(record))), None)
                if published:
                    following[key] = f"{now}-{published[:16]}"
                else:
                    found[key] = History(now, tuple(attempt_of(*one) for one in attempts))
            current = following
        yield from (found[key] for key in part)


def _keys(key: str, retries: int) -> list[str]:
    return [retry_key(key, number) for number in range(retries + 1)]


def _newest(instance: DagsterInstance, keys: Sequence[str]) -> dict[str, RunRecord]:
    """By run key the newest run, or one that was published: a re-execution has the key of its parent."""
    found: dict[str, RunRecord] = {}
    for start in range(0, len(keys), _CHUNK):
        wanted = RunsFilter(tags={RUN_KEY_TAG: [*keys[start : start + _CHUNK]]})
        for record in instance.get_run_records(wanted):  # the newest first
            key = record.dagster_run.tags[RUN_KEY_TAG]
            if key not in found or (_publication(record) and not _publication(found[key])):
                found[key] = record
    return found


def _publication(record: RunRecord) -> str | None:
    """The commit on `main` as which the run was published; None if it was not."""
    run = record.dagster_run
    place = place_of(run.tags, run.run_id)
    return publication_of(run.tags, place.branch) if place is not None else None


def attempt_of(number: int, record: RunRecord) -> Attempt:
    """What became of a run that was launched as attempt `number`, counted from 0."""
    outcome = outcome_of(record.dagster_run)
    ended = record.update_timestamp
    if record.end_time is not None and outcome is not Outcome.UNFINISHED:
        ended = datetime.fromtimestamp(record.end_time, UTC)
    elif ended.tzinfo is None:
        ended = ended.replace(tzinfo=UTC)
    reason = record.dagster_run.tags.get(RunTag.REASON, "")
    return Attempt(number, record.dagster_run.run_id, outcome, ended, "" if reason == NONE else reason)
