"""What there is to publish: branches of ended runs, the oldest first, and why others are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster import DagsterInstance, DagsterRun

from branchlake_dagster.branching.branch.owner import owners
from branchlake_dagster.branching.branch.run_branch import run_id_of
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.reconcile.outcome import Outcome, PublicationAction


@dataclass(frozen=True)
class Ended:
    """A branch by name and its run, which has ended."""

    branch: str
    run: DagsterRun


def backlog(
    instance: DagsterInstance, branches: Sequence[Reference], *, location: str | None
) -> tuple[list[Ended], list[Outcome]]:
    """The branches of the ended runs of a code location (None: of all), and what is said of the others.

    The oldest first: it has waited longest, and a later run has seen less of what others did.
    """
    found: list[tuple[float, int, Ended]] = []
    others: list[Outcome] = []
    records = owners(instance, [branch.name for branch in branches])
    for branch in branches:
        record = records[branch.name]
        if record is None:
            detail = "Dagster knows no such run; left to the reaper"
            others.append(Outcome(branch.name, run_id_of(branch.name), PublicationAction.UNKNOWN_RUN, detail))
            continue
        run = record.dagster_run
        if (other := other_location(run, location)) is not None:
            detail = f"the run belongs to code location {other}, whose own sensor judges it"
        elif not run.is_finished:
            detail = f"the run is {run.status.value.lower()}"
        else:
            found.append((record.end_time or 0.0, record.storage_id, Ended(branch.name, run)))
            continue
        others.append(Outcome(branch.name, run.run_id, PublicationAction.WAITING, detail))
    found.sort(key=lambda one: one[:2])
    return [one for _, _, one in found], others


def other_location(run: DagsterRun, location: str | None) -> str | None:
    """The code location of the run, if it is not `location`: only its own definitions know its checks."""
    origin = run.remote_job_origin
    if location is None or origin is None:
        return None
    name = origin.repository_origin.code_location_origin.location_name
    return None if name == location else name
