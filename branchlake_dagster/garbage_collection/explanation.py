"""Explain which references keep a file, and whether an earlier state of a table can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from pyiceberg.io import FileIO, load_file_io

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_metadata_fields
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.garbage_collection.collection_plan import CollectionRules
from branchlake_dagster.garbage_collection.journal import CollectionJournal
from branchlake_dagster.garbage_collection.live_history import LiveHistory, LiveState, content_locations
from branchlake_dagster.garbage_collection.reachable_files import (
    parse_state,
    read_manifest_list,
    read_manifest_paths,
)
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles, is_unicode, to_time
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieNotFound
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.tables.location_keys import Keys, LocationKeyer, split_scheme


@dataclass(frozen=True)
class FileHolder:
    """A table state from which a file is reachable, and a reference and commit that have this state.

    `snapshot_ids` are the snapshots of the state that contain the file; empty for metadata and statistics.
    """

    reference: str
    commit: str
    table: str
    metadata_location: str
    snapshot_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class FileExplanation:
    """The references that keep a file: `holders`. Without holders, the file is not reachable.

    `state` is the file's newest state in the journal (`planned`, `deleted`, …), or empty. `last_root` says
    how the file became unreachable, or is empty. `unreachable_since` is the time of the pass that first
    planned to delete the file; None if no pass did, or if the file has holders. `due_at` is when an open
    plan may delete it; None without such a plan. `unreadable` are metadata files that could not be read:
    the file may be reachable from them, so it is kept if it lies in a folder of their tables.
    """

    path: str
    exists: bool
    size: int
    modified_at: datetime | None
    holders: tuple[FileHolder, ...]
    state: str = ""
    last_root: str = ""
    unreachable_since: datetime | None = None
    due_at: datetime | None = None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class MomentExplanation:
    """Whether the state of a table at a moment of `main` can be read.

    `commit` is the newest commit of `main` at that moment; None if the first commit of `main` is younger.
    `exists` is whether that commit has the table. `expired` is true if no reference keeps that commit, so its
    files may be deleted. `oldest_moment` is the oldest moment of `main` that is kept; None without commits.
    """

    table: str
    moment: datetime
    commit: str | None
    exists: bool
    expired: bool
    oldest_moment: datetime | None


def is_moment(question: str) -> bool:
    """Return whether a question is about a table at a moment (`shop.t@2026-11-20`), not about a file."""
    return "@" in question and "/" not in question


class Explainer:
    """Answers questions about files and moments. Call `history.update()` before you pass `history`."""

    def __init__(
        self,
        client: NessieClient,
        history: LiveHistory,
        files: WarehouseFiles,
        journal: CollectionJournal,
        properties: Mapping[str, str],
        rules: CollectionRules,
    ) -> None:
        self._client = client
        self._history = history
        self._files = files
        self._journal = journal
        self._properties = dict(properties)
        self._rules = rules
        self._keyer = LocationKeyer()
        self._has_by_file: dict[str, bool] = {}
        self._unreadable: set[str] = set()

    def explain(self, question: str, now: datetime) -> FileExplanation | MomentExplanation:
        """Answer a question: the path or location of a file, or `table@moment`.

        See `FileCollector.explain`.
        """
        if is_moment(question):
            name, _, moment = question.rpartition("@")
            return self._explain_moment(name, moment, now)
        return self._explain_file(question)

    # -- files -----------------------------------------------------------------------------------------

    def _explain_file(self, location: str) -> FileExplanation:
        path = self._find_path(location)
        # A table may name a link, or the file to which it leads.
        target = os.path.realpath(path) if self._files.is_local else path
        (file,) = self._files.inspect([target])
        if file is not None and file.size < 0:
            raise ConfigurationError(
                f"{location} is a folder, or another special file.",
                hint="Name one file. A folder is needed as long as one of its files is.",
                reason="not_a_file",
                subject=location,
            )
        wanted = self._keyer.keys([self._files.location_of(each) for each in (path, target)])
        holders: list[FileHolder] = []
        for state in self._history.states.values():
            found = self._find_in_state(state, wanted)
            if found is not None:
                holders += self._find_references(state, found)
        rows = self._journal.find_file(path)
        planned = next((row for row in rows if row["state"] == "planned"), None)
        due = planned["time"] + self._rules.delay if planned and rows[-1]["state"] == "planned" else None
        return FileExplanation(
            location,
            file is not None,
            file.size if file is not None else 0,
            to_time(file.modified_us) if file is not None else None,
            tuple(holders),
            rows[-1]["state"] if rows else "",
            planned["last_root"] if planned else "",
            planned["time"] if planned and not holders else None,
            due,
            tuple(sorted(self._unreadable)),
        )

    def _find_path(self, location: str) -> str:
        """Return the path of a location in the warehouse's file system. Raises ConfigurationError.

        A location without a scheme is such a path already, as in a plan.
        """
        if not is_unicode(location):
            raise ConfigurationError(
                f"{location!r} is not Unicode, as the paths of all files of tables are.",
                hint="No table has a file with this name, and no collection deletes it.",
                reason="not_unicode",
                subject=repr(location),
            )
        family, path = split_scheme(location)
        storage, _ = split_scheme(self._files.location)
        if family == storage:
            return self._files.path_of(location)
        if family == "file" and ":" not in location.partition("/")[0]:
            return path.lstrip("/")
        raise ConfigurationError(
            f"{location} is not in the storage of the warehouse {self._files.location}.",
            hint="Name a file of the warehouse, with its bucket if it is an object store.",
            reason="other_storage",
            subject=location,
        )

    def _find_references(self, state: LiveState, snapshot_ids: tuple[int, ...]) -> list[FileHolder]:
        """Return the references whose heads have this state; if none has, the state's own reference."""
        at_head = []
        for name, head in self._history.heads.items():
            try:
                content = self._client.contents(f"@{head}", [state.key]).get(state.key)
            except NessieNotFound:
                continue
            if content is not None and (state.location, state.content_type) in content_locations(content):
                at_head.append(FileHolder(name, head, state.key.name, state.location, snapshot_ids))
        return at_head or [
            FileHolder(state.reference, state.commit, state.key.name, state.location, snapshot_ids)
        ]

    def _find_in_state(self, state: LiveState, wanted: Keys) -> tuple[int, ...] | None:
        """Return the ids of the snapshots of a state that contain a file with one of the keys `wanted`.

        Empty for the metadata file and statistics; None if the file is not reachable from the state.
        """
        if self._is_wanted(state.location, wanted):
            return ()
        if not state.is_table:
            return None
        try:
            fields = read_metadata_fields(self._io(state.location), state.location)
            files = parse_state(fields)
        except (OSError, ValueError, StoredFileDamaged):
            self._unreadable.add(state.location)
            return None
        if any(self._is_wanted(path, wanted) for path in files.statistics):
            return ()
        snapshot_ids = tuple(
            snapshot["snapshot-id"]
            for snapshot in fields.get("snapshots") or ()
            if self._has_snapshot(snapshot, wanted)
        )
        return snapshot_ids or None

    def _has_snapshot(self, snapshot: Mapping[str, object], wanted: Keys) -> bool:
        manifests = snapshot.get("manifests")
        if isinstance(manifests, list) and any(
            self._has_manifest(str(path), 0, wanted) for path in manifests
        ):
            return True
        location = snapshot.get("manifest-list")
        if not isinstance(location, str):
            return False
        if location not in self._has_by_file:
            self._has_by_file[location] = self._is_wanted(location, wanted) or any(
                self._has_manifest(path, length, wanted) for path, length in self._read_list(location)
            )
        return self._has_by_file[location]

    def _read_list(self, location: str) -> list[tuple[str, int]]:
        try:
            return read_manifest_list(self._io(location), location)
        except (OSError, ValueError, StoredFileDamaged):
            self._unreadable.add(location)
            return []

    def _has_manifest(self, location: str, length: int, wanted: Keys) -> bool:
        if location not in self._has_by_file:
            self._has_by_file[location] = self._is_wanted(location, wanted) or self._lists_file(
                location, length, wanted
            )
        return self._has_by_file[location]

    def _lists_file(self, location: str, length: int, wanted: Keys) -> bool:
        try:
            live = read_manifest_paths(self._io(location), location, length).live
        except (OSError, ValueError, StoredFileDamaged):
            self._unreadable.add(location)
            return False
        return bool(np.isin(self._keyer.keys(live), wanted).any())

    def _is_wanted(self, location: str, wanted: Keys) -> bool:
        return bool(np.isin(self._keyer.keys([location]), wanted).any())

    def _io(self, location: str) -> FileIO:
        return load_file_io(self._properties, location)

    # -- moments ---------------------------------------------------------------------------------------

    def _explain_moment(self, name: str, text: str, now: datetime) -> MomentExplanation:
        try:
            key, moment = ContentKey.from_path(name), datetime.fromisoformat(text)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"{name}@{text} is not a table and a moment.",
                hint="Write namespace.table@2026-11-20T12:00, in UTC or with a time zone.",
                reason="not_a_moment",
                subject=f"{name}@{text}",
            ) from error
        if moment > now:
            raise ConfigurationError(
                f"The moment {moment.isoformat()} is in the future.",
                hint="Write a moment of the past, in UTC or with a time zone.",
                reason="moment_in_future",
                subject=f"{name}@{text}",
            )
        log = self._client.log(MAIN)
        times = ((entry.commit.commit_time, entry.commit.hash) for entry in log)
        commit = next((each for time, each in times if time is not None and time <= moment), None)
        contents = self._client.contents(f"@{commit}", [key]) if commit else {}
        return MomentExplanation(
            name,
            moment,
            commit,
            key in contents,
            commit is not None and not self._history.has_commit(commit),
            find_oldest_moment(self._history, now, self._rules),
        )


def find_oldest_moment(history: LiveHistory, now: datetime, rules: CollectionRules) -> datetime | None:
    """Return the oldest moment at which `main` can be read; None if `main` has no commits.

    This is the time of its oldest live commit, but not longer ago than the history horizon.
    """
    oldest = history.oldest_commit_times.get(MAIN)
    return max(oldest, now - rules.horizon.duration(MAIN)) if oldest is not None else None
