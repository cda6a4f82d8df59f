"""Publishing: one merge of a run's branch into `main`, whose commit is the entry in the ledger.

Nessie's log on `main` is the only record of publications. The commit carries who, what and from where in
its properties (prefix `branchlake.`), so a lost reply is looked up instead of guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import NAMESPACE_URL, uuid5

from branchlake_dagster.lakehouse.errors import BranchlakeError, OutcomeUnknown
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import (
    ContentKey,
    Delete,
    IcebergTable,
    KeyConflict,
    LogEntry,
    Put,
    Reference,
)

PUBLICATION_ID = "branchlake.publication_id"
RUN_ID = "branchlake.run_id"
ROOT_RUN_ID = "branchlake.root_run_id"
VERDICT = "branchlake.verdict"
BASE_HASH = "branchlake.base_hash"
BRANCH = "branchlake.branch"
TABLES = "branchlake.tables"


@dataclass(frozen=True)
class Candidate:
    """A run's branch as it shall be published: exactly the commits from `base_hash` to `head_hash`."""

    branch: str
    head_hash: str
    base_hash: str
    run_id: str
    root_run_id: str
    verdict: str
    tables: tuple[str, ...]

    @property
    def publication_id(self) -> str:
        """The same for the same content: publishing twice is recognised by it."""
        return str(uuid5(NAMESPACE_URL, f"branchlake:{self.run_id}:{self.head_hash}"))

    def properties(self) -> dict[str, str]:
        """What the publication's commit says about itself."""
        return {
            PUBLICATION_ID: self.publication_id,
            RUN_ID: self.run_id,
            ROOT_RUN_ID: self.root_run_id,
            VERDICT: self.verdict,
            BASE_HASH: self.base_hash,
            BRANCH: self.branch,
            TABLES: ",".join(self.tables),
        }


@dataclass(frozen=True)
class Published:
    """The candidate is on `main`, in the commit `hash`. `now` is False when an earlier call did it."""

    hash: str
    now: bool


@dataclass(frozen=True)
class Conflicting:
    """`main` changed what the candidate changes; nothing was published."""

    conflicts: tuple[KeyConflict, ...]
    other_runs: Mapping[str, str]

    def reason(self) -> str:
        """The tables and who changed them meanwhile."""
        told = [
            f"{table} (changed by run {self.other_runs[table]})" if table in self.other_runs else table
            for table in (c.key.name if c.key else c.message for c in self.conflicts)
        ]
        return f"main changed meanwhile: {', '.join(told)}"


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """`main` is said to hold the candidate, and the ledger does not know it."""


def write_set(client: NessieClient, base_hash: str, ref: Reference) -> tuple[str, ...]:
    """The tables whose content differs between the base and the branch, by dotted name."""
    if ref.hash == base_hash:
        return ()
    entries = client.diff(f"@{base_hash}", ref.pinned)
    return tuple(
        sorted(
            entry.key.name
            for entry in entries
            if isinstance(entry.to_content or entry.from_content, IcebergTable)
        )
    )


def publish(client: NessieClient, candidate: Candidate) -> Published | Conflicting:
    """Merge the candidate into `main` in one commit. Safe to call again after any failure of it.

    Raises a NessieError: Transient and OutcomeUnknown ones mean "call again", nothing else is needed.
    """
    result = client.merge(
        from_name=candidate.branch,
        from_hash=candidate.head_hash,
        into=MAIN,
        expected_hash=client.reference(MAIN).hash,
        message=f"Publish {', '.join(candidate.tables)} from run {candidate.run_id}",
        properties=candidate.properties(),
    )
    if result.applied:
        return Published(result.target_hash, now=True)
    if result.successful:
        found = find_publication(client, candidate.publication_id)
        if found is None:
            # Merged by hand, or not at all: Nessie answers the same. Saying "published" would be a guess.
            raise PublicationUnexplained(
                "Nessie says that main holds this branch, but main's log has no publication of it.",
                branch=candidate.branch,
                run_id=candidate.run_id,
                hint="Look at main's log for who merged it; if its rows are there, delete the branch.",
            )
        return Published(found.commit.hash, now=False)
    return Conflicting(result.conflicts, _who_changed(client, candidate, result.conflicts))


def find_publication(client: NessieClient, publication_id: str) -> LogEntry | None:
    """The commit of a publication in `main`'s log."""
    property_of = f"commit.properties['{PUBLICATION_ID}']"
    expression = f"'{PUBLICATION_ID}' in commit.properties && {property_of} == '{publication_id}'"
    return next(iter(client.log(MAIN, filter=expression, limit=1)), None)


def publications(client: NessieClient, *, limit: int | None = None) -> Iterable[LogEntry]:
    """The ledger: publications on `main`, newest first."""
    return client.log(MAIN, filter=f"'{PUBLICATION_ID}' in commit.properties", limit=limit)


def _who_changed(
    client: NessieClient, candidate: Candidate, conflicts: Iterable[KeyConflict]
) -> dict[str, str]:
    """For each conflicting table the run whose publication changed it since the candidate's base."""
    wanted: set[ContentKey] = {conflict.key for conflict in conflicts if conflict.key}
    found: dict[str, str] = {}
    for entry in client.log(MAIN, fetch_operations=True):
        if entry.commit.hash == candidate.base_hash or not wanted:
            break
        for operation in entry.operations:
            if isinstance(operation, Put | Delete) and operation.key in wanted:
                wanted.discard(operation.key)
                found[operation.key.name] = entry.commit.properties.get(RUN_ID, "outside branchlake")
    return found
