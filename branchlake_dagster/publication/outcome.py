"""The outcome of one pass for a branch, and the search for branches that a pass has to handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dagster import AssetCheckKey, AssetKey, DagsterInstance, DagsterRun, RunRequest

from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.verdict import Verdict
from branchlake_dagster.runs.branch_owner import load_branch_owners
from branchlake_dagster.runs.run_branch import run_id_of_branch


class PublicationAction(StrEnum):
    """What a pass did with a branch."""

    PUBLISHED = "published"
    BLOCKED = "blocked"
    REFUSED = "refused"
    DISCARDED = "discarded"
    CHECKING = "checking"
    WAITING = "waiting"
    KEPT = "kept"
    UNBRANCHED = "unbranched"
    UNKNOWN_RUN = "unknown run"
    TRY_AGAIN = "try again"
    PARKED = "set aside"


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
    action: PublicationAction
    detail: str
    verdict: Verdict | None = None
    publication: str | None = None
    tables: tuple[str, ...] = ()
    check_run: CheckRun | None = None
    next_step: str = ""
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.branch}: {self.action}, {self.detail}"


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
                Outcome(branch.name, run_id_of_branch(branch.name), PublicationAction.UNKNOWN_RUN, detail)
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
        other_outcomes.append(Outcome(branch.name, run.run_id, PublicationAction.WAITING, detail))
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
