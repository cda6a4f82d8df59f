"""The outcome of one pass for a branch, the report of a pass, and the branches that a pass has to handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagster import AssetCheckKey, AssetKey, DagsterInstance, DagsterRun, RunRequest

from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.verdict import Verdict
from branchlake_dagster.runs.branch_owner import load_branch_owners
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.wording import pluralize


@dataclass(frozen=True)
class CheckRun:
    """A Dagster run to be launched for these (asset, check) pairs only. `key` is its run key."""

    key: str
    checks: tuple[tuple[str, str], ...]
    branch: str
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        names = ", ".join(f"{check} on {asset}" for asset, check in self.checks)
        return f"requests {names} on {self.branch}, because main has changed"

    def to_run_request(self) -> RunRequest:
        """Return the run as a sensor's request."""
        return RunRequest(
            run_key=self.key,
            tags=dict(self.tags),
            asset_check_keys=[
                AssetCheckKey(AssetKey.from_user_string(asset), name) for asset, name in self.checks
            ],
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one pass for one branch.

    `publication` is the commit on `main`; `detail` is the explanation. `check_run` is the run that a rebased
    publication needs before it can continue. `next_step` is the advice for a run that was not published.
    `codes` has the causes in snake case, such as `check_failed` or `same_files`.
    """

    branch: str
    run_id: str
    state: RunState
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()
    check_run: CheckRun | None = None
    next_step: str = ""
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.branch}: {self.state}, {self.detail}"


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended, with the name of its branch."""

    branch: str
    run: DagsterRun


def find_ended_runs(
    instance: DagsterInstance, branches: Sequence[Reference], *, location: str | None
) -> tuple[list[EndedRun], list[Outcome]]:
    """Return the ended runs of a code location with their branches, and outcomes for other branches.

    With None as `location` the runs of all code locations are returned. The oldest run comes first: it has
    waited longest, and a later run has seen more of other runs' changes.
    """
    ended_runs: list[tuple[float, int, EndedRun]] = []
    other_outcomes: list[Outcome] = []
    records = load_branch_owners(instance, [branch.name for branch in branches])
    for branch in branches:
        record = records[branch.name]
        if record is None:
            detail = "Dagster does not know the run; left to the reaper"
            other_outcomes.append(
                Outcome(branch.name, run_id_of_branch(branch.name), RunState.UNKNOWN_RUN, detail)
            )
            continue
        run = record.dagster_run
        if (other_name := find_other_location(run, location)) is not None:
            detail = f"the run belongs to code location {other_name}, whose own sensor judges it"
        elif not run.is_finished:
            detail = f"the run is {run.status.value.lower()}"
        else:
            ended_runs.append((record.end_time or 0.0, record.storage_id, EndedRun(branch.name, run)))
            continue
        other_outcomes.append(Outcome(branch.name, run.run_id, RunState.WAITING, detail))
    ended_runs.sort(key=lambda item: item[:2])
    return [item for _, _, item in ended_runs], other_outcomes


def find_other_location(run: DagsterRun, location: str | None) -> str | None:
    """Return the code location of the run if it is not `location`, else None.

    Only a run's own code location has the definitions of its checks.
    """
    origin = run.remote_job_origin
    if location is None or origin is None:
        return None
    location_name = origin.repository_origin.code_location_origin.location_name
    return None if location_name == location else location_name


_MAX_EXAMPLES = 10
_MAX_EXAMPLE_CHARS = 300
_MAX_LOG_LINES = 500
_ONLY_COUNTED = (
    RunState.WAITING,
    RunState.KEPT,
    RunState.UNKNOWN_RUN,
    RunState.PARKED,
)
"""States of branches that are left as they are at every tick. In full, 4,300 branches gave 459,000
characters."""


@dataclass
class PassReport:
    """The outcomes of one pass: counts by state, the first outcomes as text, and check runs to launch."""

    counts: Counter[RunState] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome. Returns whether it is worth a line in the tick's log."""
        self.counts[outcome.state] += 1
        if outcome.check_run:
            self.check_runs.append(outcome.check_run)
        if outcome.state in _ONLY_COUNTED:
            return False
        if len(self.examples) < _MAX_EXAMPLES:
            message = str(outcome)
            self.examples.append(
                message if len(message) <= _MAX_EXAMPLE_CHARS else f"{message[: _MAX_EXAMPLE_CHARS - 1]}…"
            )
        return self._count_reported() <= _MAX_LOG_LINES

    def format_message(self) -> str:
        """Format the report in at most a few thousand characters."""
        phrases = {
            RunState.WAITING: ("waits or is running", "wait or are running"),
            RunState.KEPT: ("is kept for debugging", "are kept for debugging"),
            RunState.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            RunState.PARKED: (
                "is parked (`branchlake set-aside`)",
                "are parked (`branchlake set-aside`)",
            ),
        }
        counts = [
            f"{count} {pluralize(count, *phrases[state])}"
            for state in phrases
            if (count := self.counts[state])
        ]
        unlisted_count = self._count_reported() - len(self.examples)
        parts = [*self.examples, *([f"and {unlisted_count} more, in the log"] if unlisted_count else [])]
        other_branches = f"Of the other branches {', '.join(counts)}." if counts else ""
        if not parts:
            return f"Nothing to publish. {other_branches}".rstrip()
        return " | ".join([*parts, *([other_branches] if other_branches else [])])

    def format_row(self) -> str:
        """Format the report in a few words, for the tick's row in Dagster's list.

        Dagster shows the tick's cursor in that row.
        """
        reported_counts = {state: count for state, count in self.counts.items() if state not in _ONLY_COUNTED}
        return (
            ", ".join(f"{state} {count}" for state, count in reported_counts.items()) or "nothing to publish"
        )

    def _count_reported(self) -> int:
        return sum(count for state, count in self.counts.items() if state not in _ONLY_COUNTED)
