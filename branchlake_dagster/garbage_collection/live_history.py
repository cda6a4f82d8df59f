"""Find the table states that may still be read, from all references of Nessie and their histories.

A commit is live if it is the head of a branch or tag, or younger than the history horizon of a reference
whose history contains it. The newest commit older than the horizon is live as well, because it was the
state of the lake at the horizon. Every state of a table or view that a live commit has is live.

References share most of their history. A commit is read once, so a hundred references cost about as much
as one. References of other Dagster instances and of other tools count as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    IcebergTable,
    LogEntry,
    Namespace,
    OtherContent,
    Put,
    Reference,
)

CLOCK_TOLERANCE = timedelta(hours=1)
"""The largest difference that is expected between clocks of the servers that wrote a history."""
_MAX_PAGE = 200


@dataclass(frozen=True)
class HistoryHorizon:
    """How long earlier commits stay readable: the duration of the first matching pattern, else `default`.

    `by_pattern` maps patterns of reference names (`release-*`, as in a shell) to durations.
    """

    default: timedelta
    by_pattern: tuple[tuple[str, timedelta], ...] = ()

    def duration(self, reference_name: str) -> timedelta:
        """Return the horizon of a reference."""
        matches = (each for pattern, each in self.by_pattern if fnmatchcase(reference_name, pattern))
        return next(matches, self.default)


@dataclass(frozen=True)
class LiveState:
    """A state of a table or view that may still be read, because a live commit has it.

    `location` is the state's metadata file. `reference` and `commit` say where the state was found first;
    other references and commits may have it too. `content_type` is Nessie's type, such as `ICEBERG_TABLE`.
    """

    location: str
    key: ContentKey
    content_type: str
    reference: str
    commit: str

    @property
    def is_table(self) -> bool:
        """Whether the location is the metadata file of an Iceberg table."""
        return self.content_type == "ICEBERG_TABLE"


def content_locations(content: Content) -> tuple[tuple[str, str], ...]:
    """Return the locations that a content names, each with the content's type; empty for a namespace.

    If this package does not know the content's type, every string of its payload with a slash counts as a
    location.
    """
    if isinstance(content, IcebergTable):
        return ((content.metadata_location, "ICEBERG_TABLE"),)
    if isinstance(content, Namespace):
        return ()
    assert isinstance(content, OtherContent)  # noqa: S101 - the last of the three classes
    return tuple(
        (value, content.type)
        for value in content.payload.values()
        if isinstance(value, str) and "/" in value and "\n" not in value
    )


class LiveHistory:
    """The live states of a lake at `now`. `update` reads the references, and may be called again.

    States are only added: a state that was live once stays live for this object. `progress` is called with
    a sentence. States of `excluded` references are live as well, but their heads are not in `heads_digest`.
    References whose names begin with one of `ignored_prefixes` are not read.
    """

    def __init__(
        self,
        client: NessieClient,
        horizon: HistoryHorizon,
        now: datetime,
        *,
        excluded: frozenset[str] = frozenset(),
        ignored_prefixes: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._horizon = horizon
        self._now = now
        self._excluded = excluded
        self._ignored_prefixes = ignored_prefixes
        self._progress = progress
        self._covered: dict[str, datetime] = {}
        """Commits that were read -> the time back to which the history before the commit was read."""
        self._listed_hash: str | None = None
        self.heads: dict[str, str] = {}
        """The head of each reference at the last update, by the reference's name."""
        self.states: dict[str, LiveState] = {}
        """The live states by location."""
        self.oldest_commit_times: dict[str, datetime] = {}
        """The time of the oldest commit that was read from a reference, by the reference's name."""

    @property
    def commit_count(self) -> int:
        """The number of commits that were read."""
        return len(self._covered)

    def has_commit(self, commit_hash: str) -> bool:
        """Return whether a commit is live: its states may still be read."""
        return commit_hash in self._covered

    def update(self) -> list[LiveState]:
        """Read the references and the new commits of their histories. Return the states that were added.

        Raises NessieError. Costs one request for all references, and one for each new head.
        """
        references = [
            ref
            for ref in self._client.references(fetch_metadata=True)
            if not ref.name.startswith(self._ignored_prefixes)
        ]
        known_locations = len(self.states)
        # The longest horizon first: then no commit is read twice.
        references.sort(key=lambda ref: (-self._horizon.duration(ref.name), ref.name != "main", ref.name))
        for number, ref in enumerate(references):
            if self.heads.get(ref.name) != ref.hash:
                self._progress(f"Reading reference {number + 1:,} of {len(references):,}: {ref.name}.")
                self._walk(ref)
        self.heads = {ref.name: ref.hash for ref in references}
        return list(self.states.values())[known_locations:]

    def heads_digest(self) -> str:
        """Return the SHA-256 of all references and their heads, without the excluded references."""
        lines = sorted(f"{name} {head}" for name, head in self.heads.items() if name not in self._excluded)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _walk(self, ref: Reference) -> None:
        cutoff = self._now - self._horizon.duration(ref.name) - CLOCK_TOLERANCE
        if ref.hash == self._client.no_ancestor_hash or self._is_covered(ref.hash, cutoff):
            return
        ahead = ref.metadata.commits_ahead if ref.metadata else None
        page_size = _MAX_PAGE if ahead is None or ref.name == "main" else min(_MAX_PAGE, ahead + 1)
        for entry in self._client.log(f"@{ref.hash}", fetch_operations=True, page_size=page_size):
            commit = entry.commit
            if self._is_covered(commit.hash, cutoff):
                return
            self._covered[commit.hash] = cutoff
            self._add_puts(entry, ref.name)
            if commit.commit_time is not None:
                self.oldest_commit_times[ref.name] = commit.commit_time
                if commit.commit_time < cutoff:
                    self._add_listing(commit.hash, ref.name)
                    return

    def _is_covered(self, commit_hash: str, cutoff: datetime) -> bool:
        covered_cutoff = self._covered.get(commit_hash)
        return covered_cutoff is not None and covered_cutoff <= cutoff

    def _add_puts(self, entry: LogEntry, ref_name: str) -> None:
        for operation in entry.operations:
            if isinstance(operation, Put):
                self._add_content(operation.key, operation.content, ref_name, entry.commit.hash)

    def _add_listing(self, commit_hash: str, ref_name: str) -> None:
        """Add all states that a commit has.

        After the first call, only differences from that commit are read.
        """
        if self._listed_hash is None:
            self._listed_hash = commit_hash
            listing: Iterable[tuple[ContentKey, Content | None]] = (
                (entry.key, entry.content)
                for entry in self._client.entries(f"@{commit_hash}", fetch_content=True)
            )
        else:
            changes = self._client.diff(f"@{self._listed_hash}", f"@{commit_hash}")
            listing = ((entry.key, entry.to_content) for entry in changes)
        for key, content in listing:
            if content is not None:
                self._add_content(key, content, ref_name, commit_hash)

    def _add_content(self, key: ContentKey, content: Content, ref_name: str, commit_hash: str) -> None:
        for location, content_type in content_locations(content):
            if location not in self.states:
                self.states[location] = LiveState(location, key, content_type, ref_name, commit_hash)


def read_main_tables(client: NessieClient, main_hash: str, since: str | None) -> Mapping[str, ContentKey]:
    """Return the metadata files of all tables that commits of `main` have put: location -> table key.

    Only commits after `since` are read; None reads all commits. The tables may have been dropped later.
    Raises ReferenceNotFound if the history of `main_hash` does not contain `since`. Reads no file. Costs one
    request per 200 commits.
    """
    locations: dict[str, ContentKey] = {}
    for entry in client.log(f"@{main_hash}", since=since, fetch_operations=True):
        for operation in entry.operations:
            if isinstance(operation, Put) and isinstance(operation.content, IcebergTable):
                locations.setdefault(operation.content.metadata_location, operation.key)
    return locations
