"""Reads and writes the ledger of publications, which is `main`'s log in Nessie.

The properties of a publication's commit (prefix `branchlake.`) record run, branch, base, verdict and tables.
If one commit carries several publications, each property is a list separated by commas. The property `tables`
is itself such a list, so its lists are separated by semicolons. The publisher gets each run as a `Candidate`,
and answers with `Published`, `Refused` or `NeedsChecks`.

`MainLog` caches `main`'s history. It finds which branches were published, or were merged outside branchlake.
`main`'s log grows without limit: searching 12,000 commits took 1.7 s for each branch. A commit's hash stands
for everything before it, so what was read once stays valid. Therefore the log is read once per process, back
to the oldest requested base, and afterwards only its new commits are read. If `main` was set back, the cached
commits after the fork are dropped. A long log is kept in a file for the next process (`stored_log`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote, unquote
from uuid import NAMESPACE_URL, uuid5

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import (
    ContentKey,
    DiffEntry,
    LogEntry,
    Namespace,
    Reference,
)
from branchlake_dagster.publication.stored_log import LogFile, StoredCommit
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.wording import CodedReason, format_names

_PUBLICATIONS = f"'{LakeProperty.PUBLICATION_ID}' in commit.properties"
_LISTS = (
    LakeProperty.PUBLICATION_ID,
    LakeProperty.RUN_ID,
    LakeProperty.ROOT_RUN_ID,
    LakeProperty.VERDICT,
    LakeProperty.BASE_HASH,
    LakeProperty.BRANCH,
    LakeProperty.TABLES,
)
"""The properties of a publication's commit. Each is a list with one value per publication."""
_UNQUOTED = "".join(sorted({*map(chr, range(0x20, 0x7F))} - {*",;%"}))
"""All printable ASCII characters in names of tables but the separators of the lists and their escape."""


def publication_id(branch: str) -> str:
    """Return the id of a branch's publication.

    It depends only on the branch name, because a branch is published at most once.
    """
    return str(uuid5(NAMESPACE_URL, f"branchlake:{branch}"))


@dataclass(frozen=True)
class Publication:
    """One run's branch made visible on `main`.

    `base_hash` is the commit of `main` that the branch was created from. `hash` is the commit on `main` that
    published it, and `time` the time of that commit; they are empty and None until it exists.
    `damaged_properties` are the commit properties whose values for this publication cannot be read; the
    fields that they would fill are empty.
    """

    branch: str
    run_id: str
    root_run_id: str
    verdict: str
    base_hash: str
    tables: tuple[str, ...]
    hash: str = ""
    time: datetime | None = None
    damaged_properties: tuple[str, ...] = ()

    @property
    def publication_id(self) -> str:
        """The id of the publication, a UUID derived from the branch name."""
        return publication_id(self.branch)


def publication_properties(publications: Sequence[Publication]) -> dict[str, str]:
    """Return the commit properties that record these publications; `parse_publications` is the inverse."""
    return {
        LakeProperty.PUBLICATION_ID: ",".join(publication.publication_id for publication in publications),
        LakeProperty.RUN_ID: ",".join(publication.run_id for publication in publications),
        LakeProperty.ROOT_RUN_ID: ",".join(publication.root_run_id for publication in publications),
        LakeProperty.VERDICT: ",".join(publication.verdict for publication in publications),
        LakeProperty.BASE_HASH: ",".join(publication.base_hash for publication in publications),
        LakeProperty.BRANCH: ",".join(publication.branch for publication in publications),
        LakeProperty.TABLES: ";".join(
            ",".join(quote(table, safe=_UNQUOTED) for table in publication.tables)
            for publication in publications
        ),
    }


def publication_message(publications: Sequence[Publication]) -> str:
    """Return the commit message for these publications."""
    tables = ", ".join(dict.fromkeys(table for publication in publications for table in publication.tables))
    runs = ", ".join(publication.run_id for publication in publications)
    return (
        f"Publish {tables} from run {runs}"
        if len(publications) == 1
        else f"Publish {tables} from runs {runs}"
    )


def parse_publications(entry: LogEntry) -> list[Publication]:
    """Return the publications that a commit of `main` records, in the order of the batch.

    `entry` need not have its operations. Returns [] if branchlake did not publish the commit. Never raises:
    if a property is missing, or has another number of values than most properties, its values cannot be
    assigned to runs. Then each publication is returned without them and names the property in
    `damaged_properties`.
    """
    commit_properties = entry.commit.properties
    if LakeProperty.PUBLICATION_ID not in commit_properties:
        return []
    value_lists = {
        name: commit_properties[name].split(";" if name == LakeProperty.TABLES else ",")
        for name in _LISTS
        if name in commit_properties
    }
    lengths = Counter(map(len, value_lists.values()))
    count = max(lengths, key=lambda length: (lengths[length], length))
    damaged = tuple(name for name in _LISTS if len(value_lists.get(name, ())) != count)
    value_lists |= {name: [""] * count for name in damaged}
    return [
        Publication(
            branch=value_lists[LakeProperty.BRANCH][index],
            run_id=value_lists[LakeProperty.RUN_ID][index],
            root_run_id=value_lists[LakeProperty.ROOT_RUN_ID][index],
            verdict=value_lists[LakeProperty.VERDICT][index],
            base_hash=value_lists[LakeProperty.BASE_HASH][index],
            tables=tuple(map(unquote, filter(None, value_lists[LakeProperty.TABLES][index].split(",")))),
            hash=entry.commit.hash,
            time=entry.commit.commit_time,
            damaged_properties=damaged,
        )
        for index in range(count)
    ]


def iter_publications(client: NessieClient, *, limit: int | None = None) -> Iterator[Publication]:
    """Yield publications on `main`, newest first, from at most `limit` commits that have publications."""
    for entry in client.log(MAIN, filter=_PUBLICATIONS, limit=limit):
        yield from parse_publications(entry)


@dataclass(frozen=True)
class Candidate:
    """A run's branch to be published: its changes between `base_hash` and `head_hash`.

    `changes` is that difference. `read_set` has the tables that a serializable run has read; None under
    snapshot isolation. `fully_checked_tables` are tables with a check that reads all rows; these checks must
    run again if rows of other runs were published meanwhile. `leases` are the names of the leases that the
    run must hold when it is published.
    """

    branch: str
    head_hash: str
    base_hash: str
    run_id: str
    root_run_id: str
    verdict: str
    changes: tuple[DiffEntry, ...]
    read_set: frozenset[ContentKey] | None = None
    fully_checked_tables: frozenset[ContentKey] = frozenset()
    leases: frozenset[str] = frozenset()

    @property
    def tables(self) -> tuple[str, ...]:
        """The sorted dotted names of the changed tables, views and functions."""
        return changed_tables(self.changes)

    @property
    def keys(self) -> frozenset[ContentKey]:
        """All changed keys, namespaces included."""
        return frozenset(entry.key for entry in self.changes)

    @property
    def is_serializable(self) -> bool:
        """Whether the tables that the run has read must be unchanged."""
        return self.read_set is not None

    @property
    def has_renames(self) -> bool:
        """Whether the run renamed a table: a content id was removed at one key and added at another."""
        removed_ids = {
            entry.from_content.content_id
            for entry in self.changes
            if entry.from_content and not entry.to_content
        }
        return any(
            entry.to_content.content_id in removed_ids
            for entry in self.changes
            if entry.to_content and not entry.from_content
        )

    def to_publication(self) -> Publication:
        """Return the candidate's entry for the ledger, without a commit on `main`."""
        return Publication(
            self.branch, self.run_id, self.root_run_id, self.verdict, self.base_hash, self.tables
        )


@dataclass(frozen=True)
class Published:
    """The candidate is on `main`, in the commit `hash`.

    `is_new` is False if an earlier call published it. `merged_outside` is True if the rows came to `main`
    outside branchlake, so the ledger has no entry. `rebased_tables` names the tables whose changes were
    replayed.
    """

    hash: str
    is_new: bool = True
    rebased_tables: tuple[str, ...] = ()
    merged_outside: bool = False


@dataclass(frozen=True)
class Refused:
    """`main` has changed in conflict with this candidate; none of its changes were published.

    `conflicts` has the reason by dotted table name, `partitions` the overlapping partitions, and `runs` the
    ids of the published runs that the candidate conflicts with. `only_expired` is true if the candidate would
    not conflict if it had not expired snapshots of a table.
    """

    conflicts: Mapping[str, CodedReason]
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    only_expired: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons in `conflicts`, such as `same_files`, each once."""
        return tuple(dict.fromkeys(reason.code for reason in self.conflicts.values()))

    def format_reason(self) -> str:
        """Return a sentence with the tables, the partitions, and the runs that changed them meanwhile."""
        tables = "; ".join(f"{table}: {reason}" for table, reason in self.conflicts.items())
        partition_note = f" ({format_names('partition', self.partitions)})" if self.partitions else ""
        run_note = f", published by {format_names('run', self.runs)}" if self.runs else ""
        return f"main changed meanwhile. {tables}{partition_note}{run_note}"


@dataclass(frozen=True)
class NeedsChecks:
    """The candidate can be rebased, but checks on these whole tables must first pass on the result."""

    tables: tuple[str, ...]


Result = Published | Refused | NeedsChecks


def load_write_set(client: NessieClient, base_hash: str, ref: Reference) -> tuple[DiffEntry, ...]:
    """Load the differences between the base and the branch; empty if the branch has no commit of its own."""
    return () if ref.hash == base_hash else tuple(client.diff(f"@{base_hash}", ref.pinned_ref))


def changed_tables(changes: tuple[DiffEntry, ...]) -> tuple[str, ...]:
    """Return the sorted dotted names of changed tables, views and functions, without namespaces."""
    return tuple(sorted(entry.key.name for entry in changes if not is_namespace_change(entry)))


def list_undone_publications(entry: LogEntry) -> list[str]:
    """Return the ids of the publications that a commit of `main` undid; [] for other commits."""
    return _list_ids(entry, LakeProperty.UNDONE_PUBLICATIONS)


def list_undone_runs(entry: LogEntry) -> list[str]:
    """Return the ids of the runs whose publications a commit of `main` undid, newest first, each once."""
    return list(dict.fromkeys(_list_ids(entry, LakeProperty.UNDONE_RUNS)))


def _list_ids(entry: LogEntry, name: str) -> list[str]:
    return [item for item in entry.commit.properties.get(name, "").split(",") if item]


def is_namespace_change(entry: DiffEntry) -> bool:
    """Return whether an entry creates, changes or removes only a namespace."""
    sides = (entry.from_content, entry.to_content)
    return all(side is None or isinstance(side, Namespace) for side in sides)


_MAX_COMMITS = 200_000
"""Above this number of cached commits the oldest are dropped. A commit takes about 200 bytes, or 320 with a
publication."""
_STORED_FROM = 1_000
"""The number of new commits from which on the file of stored commits is read, and written again."""


class BaseNotOnMain(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` does not hold the commit that a run started from: it was set back, or Nessie was restored."""


class MainLog:
    """A cache of `main`'s commits, as far back as they were requested. Safe to share between threads.

    It does not hold a connection: one process reads one lake through several clients. With `file`, commits
    that an earlier process has read are not read again. The file is opened only for a long log.
    """

    def __init__(
        self,
        *,
        max_commits: int = _MAX_COMMITS,
        file: LogFile | None = None,
        stored_from: int = _STORED_FROM,
    ) -> None:
        self._max_commits = max_commits
        self._file = file
        self._stored_from = stored_from
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._chain: deque[str] = deque()
        """Hashes of consecutive commits, oldest first."""
        self._lowest_position = 0
        """The position of the oldest commit. Positions only define an order."""
        self._positions: dict[str, int] = {}
        self._has_first_commit = False
        """Whether the oldest cached commit is the first commit of `main`."""
        self._publications: dict[str, int] = {}
        """The positions of publications, by the name of the published branch."""
        self._merges: dict[str, int] = {}
        """The positions of merges outside branchlake, by the hash of the merged branch head."""
        self._unstored_count = 0
        """How many commits were read since the file was read or written."""

    def find_publication(
        self,
        client: NessieClient,
        branch: str,
        *,
        base_hash: str,
        main_hash: str,
        head_hash: str | None = None,
    ) -> Published | None:
        """Return the publication of a branch after `base_hash` up to `main_hash`; None if there is none.

        `base_hash` is the commit of `main` that the branch was created from. With `head_hash`, the branch's
        head, a merge outside branchlake counts too. Raises BaseNotOnMain if the history of `main_hash` does
        not contain `base_hash`.
        """
        with self._lock:
            start, end = self._load_positions(client, base_hash, main_hash)
            position = self._publications.get(branch, start)
            if start < position <= end:
                return Published(self._chain[position - self._lowest_position], is_new=False)
            merge_position = self._merges.get(head_hash or "", start)
            if start < merge_position <= end:
                return Published(
                    self._chain[merge_position - self._lowest_position], is_new=False, merged_outside=True
                )
            return None

    def find_on_main(
        self, client: NessieClient, branch: str, *, base_hash: str, head_hash: str | None = None
    ) -> Published | None:
        """Return the result of `find_publication` for the current head of `main`.

        Also returns None if `main` no longer contains the base.
        """
        try:
            main_hash = client.reference(MAIN).hash
            return self.find_publication(
                client, branch, base_hash=base_hash, head_hash=head_hash, main_hash=main_hash
            )
        except BaseNotOnMain:
            return None

    def contains_commit(self, client: NessieClient, commit_hash: str) -> bool:
        """Return whether the commit is in the history of `main` now.

        Reads the head of `main`, and the commits that the cache does not have.
        """
        main_hash = client.reference(MAIN).hash
        try:
            with self._lock:
                self._load_positions(client, commit_hash, main_hash)
        except BaseNotOnMain:
            return False
        return True

    def find_merges(self, client: NessieClient, *, base_hash: str) -> dict[str, str]:
        """Return the merges since `base_hash` that were made outside branchlake.

        The result maps the hash of the merged branch head to the hash of the merge commit on `main`. Raises
        BaseNotOnMain if `main` no longer contains `base_hash`.
        """
        main_hash = client.reference(MAIN).hash
        with self._lock:
            start, end = self._load_positions(client, base_hash, main_hash)
            merge_positions = {
                source: position for source, position in self._merges.items() if start < position <= end
            }
            return {
                source: self._chain[position - self._lowest_position]
                for source, position in merge_positions.items()
            }

    # -- reading ---------------------------------------------------------------------------------------

    def _load_positions(self, client: NessieClient, base_hash: str, main_hash: str) -> tuple[int, int]:
        """Return the positions of both commits, after reading the missing commits from Nessie.

        Raises BaseNotOnMain if the history of `main_hash` does not contain `base_hash`.
        """
        if main_hash not in self._positions:
            self._read_newer(client, main_hash, base_hash)
        if base_hash not in self._positions and not self._has_first_commit:
            self._read_older(client, base_hash)
        if base_hash not in self._positions or self._positions[base_hash] > self._positions[main_hash]:
            raise BaseNotOnMain(
                f"Main no longer holds the commit {base_hash[:16]} from which the run started:"
                " main was set back, or Nessie was restored from a backup.",
                hint="Launch the run again; it then starts from the current main.",
            )
        positions = self._positions[base_hash], self._positions[main_hash]
        self._drop_oldest(keep_from=positions[0])
        self._save()
        return positions

    def _read_newer(self, client: NessieClient, main_hash: str, base_hash: str) -> None:
        """Read the commits after the newest cached commit, or after `base_hash` if none is cached.

        If the history of `main_hash` does not contain the newest cached commit, `main` was set back: the
        commits after the fork are read, and the cached commits after the fork are dropped. If no cached
        commit belongs to that history, all its commits are read.
        """
        newest_hash = self._chain[-1] if self._chain else base_hash
        new_entries: list[LogEntry] = []
        try:
            stored_commits = self._read_until_known(client, main_hash, newest_hash, new_entries)
        except ReferenceNotFound:
            # Main was set back or restored: the cached commits after the fork no longer belong to main.
            new_entries.clear()
            for entry in client.log(f"@{main_hash}"):
                if entry.commit.hash in self._positions:
                    newest_hash = entry.commit.hash
                    break
                new_entries.append(entry)
            else:
                self._clear()
                self._append(new_entries)
                self._has_first_commit = True
                return
        else:
            if new_entries and new_entries[-1].commit.hash in self._positions:
                newest_hash = new_entries.pop().commit.hash
            elif stored_commits:
                new_entries.pop()
                self._install(stored_commits)
                newest_hash = self._chain[-1]
        if not self._chain:
            self._chain.append(newest_hash)
            self._positions[newest_hash] = self._lowest_position
        self._drop_newer(commit_hash=newest_hash)
        self._append(new_entries)

    def _read_until_known(
        self, client: NessieClient, main_hash: str, since: str, new_entries: list[LogEntry]
    ) -> list[StoredCommit]:
        """Read commits into `new_entries`, newest first, from `main_hash` back to the commit `since`.

        Reading ends earlier at a commit that is cached or stored in the log file; that commit is then the
        last of `new_entries`. Returns the stored commits up to that commit, oldest first; empty if reading
        did not end at a stored commit. Raises ReferenceNotFound if the history does not contain `since`.
        """
        stored_commits: list[StoredCommit] = []
        stored_indexes: dict[str, int] = {}
        for entry in client.log(f"@{main_hash}", since=since):
            new_entries.append(entry)
            if entry.commit.hash in self._positions:
                return []
            if self._file is not None and not self._chain and len(new_entries) == self._stored_from:
                # The base is far back. Perhaps an earlier process has read the rest.
                stored_commits = self._file.load()
                stored_indexes = {one.hash: index for index, one in enumerate(stored_commits)}
                for number, one in enumerate(new_entries):
                    if one.commit.hash in stored_indexes:
                        del new_entries[number + 1 :]
                        break
            index = stored_indexes.get(new_entries[-1].commit.hash)
            if index is not None:
                return stored_commits[: index + 1]
        return []

    def _install(self, commits: Sequence[StoredCommit]) -> None:
        """Replace the cache with commits from the log file, oldest first.

        The last of them must be on `main`; then all earlier ones are too.
        """
        self._clear()
        self._chain.extend(one.hash for one in commits)
        self._positions = {one.hash: position for position, one in enumerate(commits)}
        for position, one in enumerate(commits):
            for name in one.branches:
                self._publications[name] = position
            for head in one.merged_heads:
                self._merges[head] = position

    def _save(self) -> None:
        """Write the log file, if at least `stored_from` commits were read since it was read or written."""
        if self._file is None or self._unstored_count < self._stored_from:
            return
        branches: defaultdict[int, list[str]] = defaultdict(list)
        merged_heads: defaultdict[int, list[str]] = defaultdict(list)
        for name, position in self._publications.items():
            branches[position].append(name)
        for head, position in self._merges.items():
            merged_heads[position].append(head)
        self._file.save(
            [
                StoredCommit(one, branches.get(position, ()), merged_heads.get(position, ()))
                for position, one in enumerate(self._chain, self._lowest_position)
            ]
        )
        self._unstored_count = 0

    def _append(self, newest_first: list[LogEntry]) -> None:
        for entry in reversed(newest_first):
            position = self._lowest_position + len(self._chain)
            self._chain.append(entry.commit.hash)
            self._record_commit(entry, position)

    def _read_older(self, client: NessieClient, base_hash: str) -> None:
        """Read back to `base_hash`, or to the first commit."""
        older_entries: Iterator[LogEntry] = client.log(f"@{self._chain[0]}")
        oldest_entry = next(older_entries, None)
        if oldest_entry is not None:
            self._record_commit(
                oldest_entry, self._lowest_position
            )  # only the hash of the oldest commit may be cached
        for entry in older_entries:
            self._lowest_position -= 1
            self._chain.appendleft(entry.commit.hash)
            self._record_commit(entry, self._lowest_position)
            if entry.commit.hash == base_hash:
                return
        self._has_first_commit = True

    def _record_commit(self, entry: LogEntry, position: int) -> None:
        self._positions[entry.commit.hash] = position
        self._unstored_count += 1
        publications = parse_publications(entry)
        branches = [publication.branch for publication in publications if publication.branch]
        self._publications |= dict.fromkeys(branches, position)
        if len(branches) < len(publications) or not publications:  # a damaged record: the parents remain
            self._merges |= dict.fromkeys(entry.commit.parent_hashes[1:], position)

    # -- forgetting ------------------------------------------------------------------------------------

    def _drop_newer(self, *, commit_hash: str) -> None:
        last_position = self._positions[commit_hash]
        while self._lowest_position + len(self._chain) - 1 > last_position:
            del self._positions[self._chain.pop()]
        self._publications = {
            name: position for name, position in self._publications.items() if position <= last_position
        }
        self._merges = {
            source: position for source, position in self._merges.items() if position <= last_position
        }

    def _drop_oldest(self, *, keep_from: int) -> None:
        """Drop the commits before the position `keep_from`, if too many commits are cached.

        Nothing is dropped if fewer than half of the allowed commits are before that position.
        """
        if (
            len(self._chain) <= self._max_commits
            or keep_from - self._lowest_position < self._max_commits // 2
        ):
            return
        while self._lowest_position < keep_from:
            del self._positions[self._chain.popleft()]
            self._lowest_position += 1
        self._has_first_commit = False
        self._publications = {
            name: position
            for name, position in self._publications.items()
            if position > self._lowest_position
        }
        self._merges = {
            source: position for source, position in self._merges.items() if position > self._lowest_position
        }
