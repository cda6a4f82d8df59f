"""Find files that nothing can read any more, journal a plan to delete them, and execute it after a delay.

The order of a pass makes it safe against commits that happen meanwhile:

1. Heartbeats are read, to find the living writers.
2. The live table states are found, and all files that they lead to are marked as reachable.
3. The folders of all tables are listed, also of dropped tables.
4. The references are read again, and files of new states are marked, until no head has changed. So a file
   that was listed and was committed before the end of this step is found as reachable.
5. Due plans are executed. Before each batch of files, step 4 is repeated and each file is inspected: a file
   whose size or time has changed, or that is reachable or claimed now, is kept.
6. The orphans that are not in an open plan are journaled as a new plan.

If another Nessie repository is recorded in the warehouse, the pass ends as well. Its files would look
unreachable.

If heartbeats or folders cannot be read, or the storage does not answer for metadata, the pass ends, and no
further file is deleted. If a metadata file of a table in the warehouse is missing or damaged, the pass
plans and deletes nothing.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from branchlake_dagster.catalog.stored_files import is_chosen_name
from branchlake_dagster.garbage_collection.candidate_spool import CandidateSelector, CandidateSpool
from branchlake_dagster.garbage_collection.collection_plan import (
    CollectionPlan,
    CollectionResult,
    CollectionRules,
    CollectionStatus,
    ExecutedPlan,
    OpenPlan,
    PassMetrics,
    PlannedFile,
    metrics_to_json,
    plan_digest,
)
from branchlake_dagster.garbage_collection.explanation import (
    Explainer,
    FileExplanation,
    MomentExplanation,
)
from branchlake_dagster.garbage_collection.journal import (
    CollectionJournal,
    JournalContended,
    JournaledPlan,
)
from branchlake_dagster.garbage_collection.live_history import CLOCK_TOLERANCE, LiveHistory, read_main_tables
from branchlake_dagster.garbage_collection.metadata_cache import CACHE_FILE, MetadataCache
from branchlake_dagster.garbage_collection.orphan_rule import FileVerdict, OrphanRule
from branchlake_dagster.garbage_collection.reachable_files import ReachableFiles, conventional_folders
from branchlake_dagster.garbage_collection.shared_warehouse import require_sole_repository
from branchlake_dagster.garbage_collection.warehouse_files import Deletion, WarehouseFiles
from branchlake_dagster.garbage_collection.writer_claims import find_living_writers, load_claims
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.runs.failure_detector import Heartbeats
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.runs.temporary_tags import remove_ended_tags
from branchlake_dagster.stored_names import JOURNAL_BRANCH, ReferencePrefix
from branchlake_dagster.tables.location_keys import LocationKeyer, canonical_location, is_inside

BATCH_FILES = 2_000
"""The number of files in a batch. Before each batch, the references are read again."""
MAX_PLANNED_FILES = 500_000
"""The most files of one plan, because a whole plan is kept in memory. The next pass plans the other files."""
_SAMPLE_FILES = 20
_SHOWN_ERRORS = 10
_LISTING_SHARE = 0.5
"""The fraction of the budget that listing may use, so that due plans are executed as well."""
_MAX_UPDATES = 100


@dataclass
class _Pass:
    """The state of one pass of a collector. `now` is the earliest time that a clock showed at its start."""

    pass_id: str
    now: datetime
    monotonic: Callable[[], float]
    keyer: LocationKeyer
    history: LiveHistory
    reachable: ReachableFiles
    cache: MetadataCache
    rule: OrphanRule
    folders: dict[str, str] = field(default_factory=dict)
    """The folders of tables, also of dropped tables -> the table's name; empty if the name is unknown."""
    metrics: PassMetrics = field(default_factory=PassMetrics)
    listed_names: list[str] = field(default_factory=list)
    """The folders in the order in which they are listed."""
    early_counts: dict[str, int] = field(default_factory=dict)
    """The number of listed files that are hidden, reachable or too young, by verdict.

    They are not in the spool.
    """
    next_folder: str = ""
    """The folder at which the next pass begins to list; empty if all were listed."""
    deadline: float = math.inf
    """The end of the budget, by `monotonic`. It begins when the files of all live states are marked."""
    repository_created_at: str | None = None
    """When the Nessie repository was created, as Nessie writes it; None in a dry run, or if it is unknown."""
    batch_count: int = 0
    """The number of batches of planned files that were begun."""
    _borrowed_folders: frozenset[str] = frozenset()
    """Canonical folders in which files of damaged tables lie, also folders of other tables."""
    _damage: tuple[int, int] = (0, 0)
    """The numbers of damaged tables and of live states when `_borrowed_folders` was last computed."""

    @property
    def is_blocked(self) -> bool:
        """Whether a metadata file in the warehouse cannot be read.

        It may lead to any file, so none is deleted.
        """
        return bool(self.reachable.unreadable_states)

    @property
    def is_over_budget(self) -> bool:
        """Whether the budget has ended. Then only the first batch of a due plan is still begun."""
        return self.monotonic() >= self.deadline

    def mark_new_states(self) -> None:
        """Mark the files of states that references gained since the last call, and update the rule.

        Repeats until no reference has a new state; after the end of the budget, reads the references once.
        """
        for _ in range(_MAX_UPDATES):
            new_states = self.history.update()
            if not new_states:
                break
            self.reachable.add_states(new_states)
            if self.is_over_budget:
                break
        protected = frozenset(self.reachable.protected_folders) | self._find_folders_of_damaged_tables()
        if protected != self.rule.protected_folders:
            self.rule = replace(self.rule, protected_folders=protected)

    def _find_folders_of_damaged_tables(self) -> frozenset[str]:
        """Return the canonical folders of damaged tables, and folders of other tables that they use.

        A table is damaged if one of its metadata files, manifest lists or manifests cannot be read.
        """
        damaged_tables = self.reachable.damaged_tables
        if not damaged_tables or self.is_blocked:
            return frozenset()
        states = self.history.states
        if self._damage != (len(damaged_tables), len(states)):
            borrowed = self.reachable.find_borrowed_folders(states.values())
            self._borrowed_folders = frozenset(map(canonical_location, borrowed))
            self._damage = len(damaged_tables), len(states)
        canonical_folders = [
            (canonical_location(folder), folder, table) for folder, table in self.folders.items()
        ]
        return frozenset(
            canonical
            for canonical, folder, table in canonical_folders
            if table in damaged_tables
            or (not table and _may_belong_to(folder, damaged_tables))
            or any(is_inside(f"{borrowed}/", canonical) for borrowed in self._borrowed_folders)
        )


class FileCollector:
    """Collects files that no reference can read any more. Several collectors may run at the same time.

    Args:
        client: The Nessie client.
        files: The files of the warehouse.
        journal: The journal of the lake.
        heartbeats: The heartbeats of the lake's writers.
        properties: PyIceberg's FileIO properties.
        rules: Grace, history horizon and delay.
        cache_file: The file of the metadata cache. If None, each pass reads all metadata files.
        budget_s: Seconds after which a pass lists and deletes no further files. They begin when the files
            of all live states (`LiveState`) are marked. A pass always deletes the first batch of a due plan.
        now: The present time by this machine's clock. A pass takes the earliest of the times of this clock,
            the store and Nessie, so that no file seems older than it is.
        monotonic: Seconds of a clock that never goes back.
        sleep: Waits for some seconds, to see whether writers with a stale heartbeat send another one.
        progress: Called with a sentence for each part of the work.
    """

    def __init__(
        self,
        client: NessieClient,
        files: WarehouseFiles,
        journal: CollectionJournal,
        heartbeats: Heartbeats,
        *,
        properties: Mapping[str, str],
        rules: CollectionRules,
        cache_file: Path | None = None,
        budget_s: float = 1800.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._files = files
        self.journal = journal
        self._heartbeats = heartbeats
        self._properties = dict(properties)
        self.rules = rules
        self._cache_file = cache_file
        self._budget_s = budget_s
        self._now = now
        self._monotonic = monotonic
        self._sleep = sleep
        self._progress = progress

    @classmethod
    def of_lake(
        cls,
        lake: Lakehouse,
        *,
        horizons: Mapping[str, timedelta] | None = None,
        budget_s: float | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], None] = time.sleep,
        progress: Callable[[str], None] = lambda _: None,
    ) -> FileCollector:
        """Create the collector of a lake from its settings. `budget_s` replaces the budget of the settings.

        `horizons` are history horizons by pattern of reference names, such as `{"release-*":
        timedelta(days=365)}`. Give the same horizons to each pass: a plan made with others is not executed.
        """
        settings = lake.settings
        files = WarehouseFiles.from_settings(settings)
        return cls(
            lake.nessie,
            files,
            CollectionJournal.of_lake(lake, files),
            HeartbeatStore.from_settings(settings),
            properties=settings.file_io_properties(),
            rules=CollectionRules.from_settings(settings, horizons),
            cache_file=settings.state_dir / CACHE_FILE,
            budget_s=settings.collection_budget_s if budget_s is None else budget_s,
            now=now,
            sleep=sleep,
            progress=progress,
        )

    # -- entry points ----------------------------------------------------------------------------------

    def plan(self) -> CollectionPlan:
        """Find the files that a pass would plan to delete. Nothing is journaled or deleted.

        Raises WarehouseShared, JournalLost, HeartbeatsUnreadable, RootsUnreadable, WarehouseUnreadable and
        NessieError.
        """
        self._require_sole_repository()
        self.journal.verify(self.journal.read_marker())
        now = self._now()
        with CandidateSpool(keyer := LocationKeyer()) as spool:
            one = self._begin("", now, keyer)
            self._list_and_mark(one, spool)
            orphans = self._find_orphans(one, spool, self.journal.load_planned_paths())
            return self._build_plan(one, orphans)

    def run(self, *, adopt_journal: bool = False) -> CollectionResult:
        """Execute the plans that are due, and journal a plan for the files that are orphans now.

        May be killed at any point and called again. `adopt_journal` accepts Nessie's journal although the
        warehouse names another journal. Raises the errors of `plan`, and JournalContended if other
        collections keep changing the journal; after an error no further file is deleted.
        """
        repository_created_at = self._require_sole_repository()
        pass_id = uuid.uuid4().hex
        clocks = [self._now(), self.journal.open(adopt=adopt_journal)]
        self.journal.record_event(pass_id, "started", min(clocks), details=self.rules.to_json())
        clocks += self._read_journal_time()
        now = min(clocks)
        remove_ended_tags(self._client, now)
        with CandidateSpool(keyer := LocationKeyer()) as spool:
            one = self._begin(pass_id, now, keyer)
            one.repository_created_at = repository_created_at
            self._list_and_mark(one, spool)
            # Read first: the files that are deleted now were listed, and are in no open plan afterwards.
            planned_paths = self.journal.load_planned_paths()
            executed = tuple(self._execute_due_plans(one))
            orphans = self._find_orphans(one, spool, planned_paths)
            plan = self._build_plan(one, orphans)
            if orphans:
                plan = self._record_plan(one, plan, orphans)
        self.journal.record_folders(one.folders, now)
        details = {
            "main_hash": one.history.heads.get(MAIN, ""),
            "next_folder": one.next_folder,
            "metrics": metrics_to_json(plan.metrics),
            "deleted": sum(each.deleted for each in executed),
            "ended_at": max(now, self._now()).isoformat(),
        }
        self.journal.record_event(pass_id, "finished", now, plan_id=plan.plan_id, details=details)
        try:
            self.journal.trim(pass_id, now)
        except JournalContended as error:
            self._progress(f"Old rows of the journal stay until the next collection: {error}")
        return CollectionResult(pass_id, now, self._now(), executed, plan)

    def explain(self, question: str) -> FileExplanation | MomentExplanation:
        """Explain which references keep a file, or whether a table can be read at an earlier moment.

        `question` is a path or location of a file, or `namespace.table@2026-11-20T12:00`. For a file, reads
        the metadata of all live states; files that cannot be read are in `FileExplanation.unreadable`.
        Raises NessieError, WarehouseUnreadable, WarehouseShared, JournalLost, and ConfigurationError for a
        malformed moment, a folder, or a location in another storage than the warehouse.
        """
        self._require_sole_repository()
        self.journal.verify(self.journal.read_marker())
        now = self._now()
        history = LiveHistory(self._client, self.rules.horizon, now, progress=self._progress)
        history.update()
        explainer = Explainer(self._client, history, self._files, self.journal, self._properties, self.rules)
        return explainer.explain(question, now)

    def status(self) -> CollectionStatus:
        """Return a summary of the journal. Reads only the journal. Raises JournalLost."""
        self.journal.verify(self.journal.read_marker())
        events = self.journal.load_events()
        started = [event for event in events if event["event"] == "started"]
        finished = [event for event in events if event["event"] == "finished"]
        last_id = started[-1]["pass_id"] if started else ""
        last_end = next((event for event in finished if event["pass_id"] == last_id), None)
        deleted_files, deleted_bytes = self.journal.count_deleted()
        return CollectionStatus(
            tuple(each.plan for each in self.journal.open_plans()),
            self.journal.count_passes(),
            started[-1]["time"] if started else None,
            _find_end(last_end) if last_end is not None else None,
            finished[-1]["details"].get("metrics", {}) if finished else {},
            deleted_files,
            deleted_bytes,
        )

    # -- a pass ----------------------------------------------------------------------------------------

    def _require_sole_repository(self) -> str | None:
        """Return when this Nessie repository was created, as Nessie writes it. Raises WarehouseShared.

        Asks the server each time: a client may be older than the repository behind its address.
        """
        created_at = self._client.config().repository_created_at
        require_sole_repository(self._files, created_at)
        return created_at

    def _read_journal_time(self) -> list[datetime]:
        """Return the time of the newest commit on the journal branch, by Nessie's clock, as a list of one.

        This commit began the pass. The list is empty if the commit or its time is missing.
        """
        entry = next(iter(self._client.log(JOURNAL_BRANCH, limit=1)), None)
        return [entry.commit.commit_time] if entry is not None and entry.commit.commit_time else []

    def _begin(self, pass_id: str, now: datetime, keyer: LocationKeyer) -> _Pass:
        writers = find_living_writers(
            self._heartbeats,
            self._now(),
            monotonic=self._monotonic,
            sleep=self._sleep,
            progress=self._progress,
        )
        rule = OrphanRule(now, self.rules.grace, tuple(load_claims(self._client, writers, self._now())))
        history = LiveHistory(
            self._client,
            self.rules.horizon,
            now,
            excluded=frozenset({JOURNAL_BRANCH}),
            progress=self._progress,
        )
        # A dry run does not ask the store for its time.
        is_time_known = bool(pass_id) or self._files.is_local
        cache = MetadataCache(
            self._cache_file,
            self._files,
            keyer,
            now if is_time_known else now - CLOCK_TOLERANCE,
            lake_identity=_describe_storage(self._properties),
            progress=self._progress,
        )
        reachable = ReachableFiles(self._properties, keyer, self._files.canonical, cache, self._progress)
        return _Pass(pass_id, now, self._monotonic, keyer, history, reachable, cache, rule)

    def _list_and_mark(self, one: _Pass, spool: CandidateSpool) -> None:
        started = self._monotonic()
        new_states = one.history.update()
        walked = self._monotonic()
        one.reachable.add_states(new_states)
        self._forget_swept_files(one)
        marked = self._monotonic()
        one.deadline = marked + self._budget_s
        one.folders = self._find_table_folders(one)
        listed_files, listed_folders, skipped = self._list_folders(one, spool)
        listed = self._monotonic()
        one.mark_new_states()
        one.cache.save()
        one.metrics = PassMetrics(
            references=len(one.history.heads),
            commits=one.history.commit_count,
            states=len(one.history.states),
            reachable_files=len(one.reachable.keys),
            listed_files=listed_files,
            listed_folders=listed_folders,
            skipped_folders=skipped,
            kept=one.early_counts,
            claimants=tuple(sorted({claim.writer for claim in one.rule.claims})),
            walk_s=walked - started,
            mark_s=marked - walked + self._monotonic() - listed,
            list_s=listed - marked,
        )

    def _forget_swept_files(self, one: _Pass) -> None:
        """Forget unreadable files that no reference needs, apart from the tags of a clean-up.

        The clean-up of discarded runs deletes the files of a run before its own tag
        (`ReferencePrefix.SWEEPING`), so these files may be missing. If a file is unreadable and there are
        such states, reads the references again, and marks the other states once more, from the cache.
        """
        if not one.reachable.unreadable_files:
            return
        history = LiveHistory(
            self._client, self.rules.horizon, one.now, ignored_prefixes=(ReferencePrefix.SWEEPING,)
        )
        history.update()
        if one.history.states.keys() <= history.states.keys():
            return
        needed = ReachableFiles(self._properties, one.keyer, self._files.canonical, one.cache, self._progress)
        needed.add_states(list(history.states.values()))
        one.reachable.replace_damage(needed)

    def _find_table_folders(self, one: _Pass) -> dict[str, str]:
        """Return the folders of all tables that were ever found, each with its table's name.

        The name is empty for a folder that only a writer has recorded.
        """
        folders = dict(one.reachable.table_folders)
        main_hash = one.history.heads[MAIN]
        since = self.journal.last_main_hash()
        try:
            main_tables = read_main_tables(self._client, main_hash, since)
        except ReferenceNotFound:
            main_tables = read_main_tables(self._client, main_hash, None)  # main was set back
        for location, key in main_tables.items():
            for folder in conventional_folders(location):
                folders.setdefault(folder, key.name)
        for folder, table in self.journal.load_folders().items():
            folders.setdefault(folder, table)
        for folder in self._files.list_recorded_folders():
            folders.setdefault(folder, "")
        return folders

    def _list_folders(self, one: _Pass, spool: CandidateSpool) -> tuple[int, int, int]:
        """List the files of the folders, and add those that may be orphans to `spool`.

        Return three numbers: listed files, listed folders, and folders that were not listed because the
        budget ended. Begins where the last pass stopped, so that each folder is listed in some pass.
        """
        folders = select_folders(one.folders, self._files)
        position = self.journal.last_folder_position()
        names = sorted(folders)
        first = next((number for number, name in enumerate(names) if name >= position), 0)
        names = names[first:] + names[:first]
        one.listed_names = names
        selector = CandidateSelector(
            self._files, one.keyer, one.reachable.keys, one.rule.newest_change_us, spool
        )
        one.early_counts = selector.kept
        deadline = self._monotonic() + (one.deadline - self._monotonic()) * _LISTING_SHARE
        listed_count = len(names)
        for number, folder in enumerate(names):
            if number and self._monotonic() >= deadline:
                one.next_folder, listed_count = folder, number
                break
            self._progress(f"Listing folder {number + 1:,} of {len(names):,}: {folder}.")
            selector.add_folder(folder, number)
        selector.flush()
        return selector.file_count, listed_count, len(names) - listed_count

    def _find_orphans(
        self, one: _Pass, spool: CandidateSpool, planned_paths: frozenset[str]
    ) -> list[PlannedFile]:
        """Return at most `MAX_PLANNED_FILES` files of `spool` that are orphans and not in `planned_paths`."""
        kept = dict(one.metrics.kept)
        orphans: list[PlannedFile] = []
        keys: list[np.uint64] = []
        left_files = 0
        for part in spool:
            locations = [self._files.location_of(path) for path in part.paths]
            verdicts = one.rule.judge(part.keys, part.last_change_us, locations, one.reachable.keys)
            for index, verdict in enumerate(verdicts):
                if verdict is not FileVerdict.ORPHAN:
                    kept[verdict.value] = kept.get(verdict.value, 0) + 1
                elif part.paths[index] in planned_paths:
                    continue
                elif len(orphans) >= MAX_PLANNED_FILES:
                    left_files += 1
                else:
                    table = one.folders.get(one.listed_names[part.folders[index]], "")
                    path, size, modified = part.paths[index], part.sizes[index], part.modified_us[index]
                    orphans.append(PlannedFile(path, table, "unreferenced", int(size), int(modified)))
                    keys.append(part.keys[index])
        one.metrics = replace(
            one.metrics,
            kept=kept,
            left_files=left_files,
            unreadable=tuple(sorted(one.reachable.unreadable_files)),
            unreadable_states=tuple(sorted(one.reachable.unreadable_states)),
        )
        removed_by = one.reachable.removed.find(np.array(keys, np.uint64))
        return [
            replace(file, last_root=f"removed by snapshot {snapshot_id}", reason="removed")
            if snapshot_id is not None
            else file
            for file, snapshot_id in zip(orphans, removed_by, strict=True)
        ]

    def _build_plan(self, one: _Pass, orphans: Sequence[PlannedFile]) -> CollectionPlan:
        by_table: dict[str, tuple[int, int]] = {}
        for file in orphans:
            count, size = by_table.get(file.table, (0, 0))
            by_table[file.table] = count + 1, size + file.size
        return CollectionPlan(
            "",
            one.now,
            one.now + self.rules.delay,
            len(orphans),
            sum(file.size for file in orphans),
            plan_digest(one.history.heads_digest(), self.rules.digest, orphans),
            by_table,
            tuple(sorted(orphans, key=lambda file: -file.size)[:_SAMPLE_FILES]),
            one.metrics,
        )

    def _record_plan(
        self, one: _Pass, plan: CollectionPlan, orphans: Sequence[PlannedFile]
    ) -> CollectionPlan:
        """Journal a plan, and return it with its new id.

        The files are written first, and then the event that makes the plan valid.
        """
        plan_id = uuid.uuid4().hex
        self.journal.record_files(plan_id, orphans, "planned", one.now)
        open_plan = OpenPlan(plan_id, one.now, plan.due_at, plan.file_count, plan.size_bytes)
        journaled = JournaledPlan(open_plan, plan.digest, self.rules.digest, one.history.heads_digest())
        details = {"due_at": plan.due_at.isoformat()}
        self.journal.record_event(one.pass_id, "planned", one.now, plan=journaled, details=details)
        return replace(plan, plan_id=plan_id)

    # -- deletion --------------------------------------------------------------------------------------

    def _execute_due_plans(self, one: _Pass) -> Iterator[ExecutedPlan]:
        started = self._monotonic()
        for journaled in self.journal.open_plans():
            if max(journaled.plan.created_at + self.rules.delay, journaled.plan.due_at) > one.now:
                continue
            if one.is_blocked or (one.batch_count and one.is_over_budget):
                break
            yield self._execute_plan(one, journaled)
        one.metrics = replace(one.metrics, delete_s=self._monotonic() - started)

    def _execute_plan(self, one: _Pass, journaled: JournaledPlan) -> ExecutedPlan:
        plan_id = journaled.plan.plan_id
        files, done_paths = self.journal.load_plan_files(plan_id)
        digest = plan_digest(journaled.heads_digest, journaled.rules_digest, files)
        state = ""
        if digest != journaled.digest or len(files) != journaled.plan.file_count:
            state = "damaged"
        elif journaled.rules_digest != self.rules.digest:
            state = "outdated"
        if state:
            details = {"state": state}
            self.journal.record_event(one.pass_id, "abandoned", one.now, plan=journaled, details=details)
            return ExecutedPlan(plan_id, state)
        result = ExecutedPlan(plan_id, "executed")
        remaining = iter([file for file in files if file.path not in done_paths])
        while batch := list(islice(remaining, BATCH_FILES)):
            if one.batch_count and one.is_over_budget:
                return replace(result, state="open")
            one.batch_count += 1
            require_sole_repository(self._files, one.repository_created_at)
            one.mark_new_states()
            if one.is_blocked:
                return replace(result, state="open")
            self._progress(f"Deleting files of plan {plan_id[:8]}: {result.deleted:,} are deleted.")
            result = self._delete_batch(one, plan_id, batch, result)
        self.journal.record_event(one.pass_id, "executed", one.now, plan=journaled)
        return result

    def _delete_batch(
        self, one: _Pass, plan_id: str, batch: Sequence[PlannedFile], result: ExecutedPlan
    ) -> ExecutedPlan:
        """Delete the files of a batch that are still orphans and unchanged, and journal what happened."""
        orphans, missing_paths = self._select_orphans(one, batch)
        deletions = {each.path: each for each in self._files.delete([file.path for file in orphans])}
        by_state: dict[str, list[PlannedFile]] = {"kept": [], "deleted": [], "missing": [], "failed": []}
        for file in batch:
            untried = Deletion(file.path, "missing" if file.path in missing_paths else "kept")
            deletion = deletions.get(file.path, untried)
            by_state[deletion.state].append(file)
        errors = {path: each.error for path, each in deletions.items() if each.error}
        for state, state_files in by_state.items():
            if state_files:
                self.journal.record_files(plan_id, state_files, state, one.now, errors)
        shown = [f"{path}: {error}" for path, error in errors.items()]
        return replace(
            result,
            deleted=result.deleted + len(by_state["deleted"]),
            deleted_bytes=result.deleted_bytes + sum(file.size for file in by_state["deleted"]),
            missing=result.missing + len(by_state["missing"]),
            kept=result.kept + len(by_state["kept"]),
            failed=result.failed + len(by_state["failed"]),
            errors=(*result.errors, *shown)[:_SHOWN_ERRORS],
            deleted_by_table=Counter(result.deleted_by_table)
            + Counter(file.table for file in by_state["deleted"]),
        )

    def _select_orphans(
        self, one: _Pass, batch: Sequence[PlannedFile]
    ) -> tuple[list[PlannedFile], frozenset[str]]:
        """Return the planned files that are still orphans and whose size and time are as planned.

        The second value is the paths of the orphans that do not exist any more. They are not in the list.
        """
        locations = [self._files.location_of(file.path) for file in batch]
        present = self._files.inspect([file.path for file in batch])
        last_change_us = np.array(
            [
                current.last_change_us if current is not None else file.modified_us
                for file, current in zip(batch, present, strict=True)
            ],
            np.int64,
        )
        verdicts = one.rule.judge(one.keyer.keys(locations), last_change_us, locations, one.reachable.keys)
        folders = {location.rpartition("/")[0] for location in locations}
        table_folders = {folder for folder in folders if self._files.is_table_folder(folder)}
        orphans: list[PlannedFile] = []
        missing_paths: set[str] = set()
        for file, location, verdict, current in zip(batch, locations, verdicts, present, strict=True):
            if verdict is not FileVerdict.ORPHAN or location.rpartition("/")[0] not in table_folders:
                continue
            if current is None:
                missing_paths.add(file.path)
            elif (current.size, current.modified_us) == (file.size, file.modified_us):
                orphans.append(file)
        return orphans, frozenset(missing_paths)


def _find_end(event: Mapping[str, Any]) -> datetime:
    """Return when a pass ended, from its last event, whose own time is that of the pass.

    Earlier versions recorded only that time.
    """
    ended_at = event["details"].get("ended_at")
    return datetime.fromisoformat(ended_at) if ended_at else event["time"]


def _describe_storage(properties: Mapping[str, str]) -> str:
    """Return the FileIO properties that say where a store is, such as its endpoint, without secrets."""
    return json.dumps({name: properties.get(name) for name in ("s3.endpoint", "s3.region")})


def _may_belong_to(folder: str, tables: Iterable[str]) -> bool:
    """Return whether a recorded folder without a table's name may be a folder of one of these tables."""
    folder_name = folder.rstrip("/").rpartition("/")[2]
    names = {table.rpartition(".")[2] for table in tables}
    return any(folder_name == name or is_chosen_name(folder_name, f"{name}_") for name in names)


def select_folders(folders: Mapping[str, str], files: WarehouseFiles) -> dict[str, str]:
    """Return the folders to list, each with its table's name.

    These are the folders inside the warehouse, without folders that lie in another folder of `folders`.
    """
    inside = {canonical_location(folder): folder for folder in folders if files.is_table_folder(folder)}
    selected: dict[str, str] = {}
    last = ""
    for canonical in sorted(inside, key=lambda each: f"{each}/"):
        if not last or not is_inside(canonical, last):
            selected[inside[canonical]] = folders[inside[canonical]]
            last = canonical
    return selected
