"""What a pass of the reaper knows, all of it looked up before it touches anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from branchlake_dagster.branching.branch.run_branch import run_id_of
from branchlake_dagster.branching.liveness.failure_detector import Liveness
from branchlake_dagster.branching.liveness.heartbeat_store import Heartbeat
from branchlake_dagster.branching.reaping.rules import Owner, RunState
from branchlake_dagster.nessie.model import Reference


@dataclass(frozen=True)
class Seen:
    """What is known. `pulses` are by branch, also of those that are gone."""

    branches: Mapping[str, Reference]
    pulses: Mapping[str, Mapping[Heartbeat, Liveness]]
    owners: Mapping[str, Owner]
    moment: datetime
    claims: frozenset[str] = frozenset()
    """The branches, gone ones too, that were claimed before they were listed."""
    claimed: frozenset[str] = frozenset()
    """The branches that were claimed before or after the runs were looked up."""

    def in_publication(self, branch: str) -> bool:
        """Whether a publisher has claimed the branch and not told yet how it ended."""
        return branch in self.claimed and not self.owner(branch).told

    def owner(self, branch: str) -> Owner:
        """The run of a branch; one that is missing, where Dagster knows none."""
        return self.owners.get(branch) or Owner(run_id_of(branch), RunState.MISSING)

    def run_known(self, branch: str) -> bool:
        """Whether Dagster knows the run of a branch."""
        return self.owner(branch).state is not RunState.MISSING

    def instances(self, branch: str) -> frozenset[str]:
        """The Dagster instances of those who beat on a branch."""
        return frozenset(beat.instance for beat in self.pulses.get(branch, {}) if beat.instance)

    def dead(self, branch: str) -> list[Heartbeat]:
        """The heartbeats on a branch whose writers are dead."""
        return [beat for beat, pulse in self.pulses.get(branch, {}).items() if pulse is Liveness.DEAD]


def age_of(branch: Reference, started: datetime | None, now: datetime) -> timedelta | None:
    """Time since the branch's own last commit, or since `started`, when its run or batch began.

    Nessie keeps no creation time of a branch; a branch without commits has its base's head commit.
    """
    metadata = branch.metadata
    own = metadata.head_commit if metadata and metadata.commits_ahead else None
    signs = [moment for moment in (own.commit_time if own else None, started) if moment]
    return now - max(signs) if signs else None
