"""What one pass did about a branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dagster import AssetCheckKey, AssetKey, RunRequest

from branchlake_dagster.publication.gate.verdict import Verdict


class PublicationAction(StrEnum):
    """What was done about a branch."""

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
    SET_ASIDE = "set aside"


@dataclass(frozen=True)
class CheckRun:
    """A Dagster run to be launched: these (asset, check) pairs and nothing else. `key` is its run key."""

    key: str
    checks: tuple[tuple[str, str], ...]
    branch: str
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        names = ", ".join(f"{check} on {asset}" for asset, check in self.checks)
        return f"asks for {names} on {self.branch}, because main has moved"

    def request(self) -> RunRequest:
        """The same for a sensor."""
        return RunRequest(
            run_key=self.key,
            tags=dict(self.tags),
            asset_check_keys=[
                AssetCheckKey(AssetKey.from_user_string(asset), name) for asset, name in self.checks
            ],
        )


@dataclass(frozen=True)
class Outcome:
    """One branch in one pass. `publication` is the commit on `main`; `detail` says why or what.

    `check_run` is the run that a rebased publication needs before it can go on, `next_step` what to do about
    a run that was not published. `codes` has the causes in snake case: `check_failed`, `same_files`.
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
