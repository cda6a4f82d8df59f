"""What the command prints: what was done to the requests, and what became of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import dagster as dg

from branchlake_dagster.runs.discarding import FAILING_STATUSES
from branchlake_dagster.runs.run_tags import NO_VALUE
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.lossy.faults import Dice, Fault
from branchlake_dagster_tests.lossy.project import KIND

_FATES = ("runs", "published", "refused or blocked", "failed")


def fate(run: dg.DagsterRun) -> str:
    """What became of a run, in one of the table's words."""
    if run.tags.get(RunTag.PUBLICATION, NO_VALUE) != NO_VALUE:
        return "published"
    return "refused or blocked" if run.tags.get(RunTag.STATUS) in FAILING_STATUSES else "failed"


def runs_table(runs: Sequence[dg.DagsterRun]) -> Iterator[str]:
    """A line per kind of run."""
    counts = Counter((run.tags[KIND], fate(run)) for run in runs)
    kinds = Counter(run.tags[KIND] for run in runs)
    yield f"{'kind':12}" + "".join(f"{name:>20}" for name in _FATES)
    for kind in [*sorted(kinds), "all"]:
        numbers = [kinds.total() if kind == "all" else kinds[kind]]
        for name in _FATES[1:]:
            numbers.append(
                sum(n for (one, what), n in counts.items() if what == name and kind in (one, "all"))
            )
        yield f"{kind:12}" + "".join(f"{number:20}" for number in numbers)


def faults_table(dice: Dice) -> Iterator[str]:
    """A line per fault."""
    yield f"{dice.requests} requests, of them"
    yield from (f"{dice.counts[fault]:8}  {fault}" for fault in Fault)


def reasons(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> Iterator[str]:
    """Why runs were not published, by kind and the most frequent first; ids and hashes left out."""
    told = Counter(
        (
            run.tags[KIND],
            _failure(instance, run) if fate(run) == "failed" else _plain(run.tags[RunTag.REASON]),
        )
        for run in runs
        if fate(run) != "published" and (fate(run) == "failed" or RunTag.REASON in run.tags)
    )
    yield from (f"{count:8}  {kind}: {text}" for (kind, text), count in told.most_common())


def _failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """The error that made a run fail: the innermost one that is not Dagster's wrapping."""
    kinds = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}
    for record in instance.get_records_for_run(run.run_id, of_type=kinds).records:
        event = record.event_log_entry.dagster_event
        data = event.event_specific_data if event else None
        error = getattr(data, "error", None)
        while error is not None and error.cause and (error.cls_name or "").startswith("Dagster"):
            error = error.cause
        if error is not None:
            return _plain(error.message)
    return "no error was noted"


def _plain(text: str) -> str:
    """The start of a message without ids, hashes and addresses."""
    return " ".join(word for word in text.split() if sum(letter.isdigit() for letter in word) < 4)[:130]
