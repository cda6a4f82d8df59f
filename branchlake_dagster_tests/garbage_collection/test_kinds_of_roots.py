"""Thousands of files, each reachable by exactly one kind of root or by none: the right ones are deleted."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.table.statistics import StatisticsFile
from pyiceberg.typedef import Record

from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection import live_history, reachable_files
from branchlake_dagster.garbage_collection.live_history import LiveHistory
from branchlake_dagster.garbage_collection.orphan_rule import OrphanRule
from branchlake_dagster.garbage_collection.reachable_files import ReachableFiles, StateFiles
from branchlake_dagster.garbage_collection.writer_claims import WriterClaim
from branchlake_dagster.internals.pyiceberg import commit_files
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, open_lake

WRITER = "run-00000000-0000-4000-8000-000000000001"


def data_file(path: str, size: int = 1) -> DataFile:
    """A file's entry: the collector never opens data files, so these have one byte."""
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=size,
    )
    file.spec_id = 0
    return file


class Scene:
    """A lake whose files are reachable by one kind of root each: kind -> paths."""

    def __init__(self, folder: Path, seed: int, per_kind: int) -> None:
        self.random = random.Random(seed)
        self.per_kind = per_kind
        self.lake = open_lake(folder)
        self.kept: dict[str, set[str]] = {}
        self.orphans: set[str] = set()
        self._build()

    # -- files -----------------------------------------------------------------------------------------

    def paths(self, kind: str, folder: Path) -> list[str]:
        """Write the files of a kind into a table's folder, under names that engines use."""
        made = []
        for number in range(self.per_kind):
            partition = self.random.choice(["", "day=2026-01-01/", "name=a b/", "_p=x%20y/", "0101/1100/"])
            path = folder / "data" / partition / f"{number:05}-{kind}-{self.random.getrandbits(40):x}.parquet"
            made.append(self.lake.write(path))
        self.kept[kind] = set(made)
        return made

    def spelled(self, path: str) -> str:
        spell: Callable[[str], str] = self.random.choice(
            [
                lambda one: f"file:{one}",
                lambda one: f"file://{one}",
                lambda one: one,
                lambda one: f"file:{one.replace(' ', '%20')}",
                lambda one: f"FILE://{one.replace('/data/', '//data/')}",
            ]
        )
        return spell(path)

    def add(self, table: Table, paths: list[str], removed: list[str] | None = None) -> None:
        self.spellings.update({path: self.spelled(path) for path in paths})
        commit_files(
            table,
            added=[data_file(self.spellings[path]) for path in paths],
            removed=[data_file(self.spellings[path]) for path in removed or ()],
            properties={},
        )

    # -- the scene -------------------------------------------------------------------------------------

    def _build(self) -> None:
        lake, self.spellings = self.lake, {}
        days_ago = lambda days: lake.at(datetime.now(UTC) - days * DAY)  # noqa: E731
        days_ago(120)
        for name in ("t", "u", "dropped"):
            lake.create(name)
        self.folders = {name: lake.table_folder(name) for name in ("t", "u", "dropped")}
        main_of_old = self.paths("only an expired commit", self.folders["t"])
        self.add(lake.table(), main_of_old)
        self.orphans |= self.kept.pop("only an expired commit")
        tagged = self.paths("tag", self.folders["t"])
        self.add(lake.table(), tagged)
        lake.tag("release-1")
        self.add(lake.table(), [], removed=[*main_of_old, *tagged])
        self._expire("t")
        dropped = self.paths("dropped table of a tag", self.folders["dropped"])
        self.add(lake.table("dropped"), dropped)
        lake.tag("before-drop")
        lake.lake.catalog().drop_table((lake.namespace, "dropped"))
        # The tag `release-1` has main_of_old as well.
        self.orphans -= set(main_of_old)
        self.kept["tag, older"] = set(main_of_old)
        days_ago(100)
        gone = self.paths("gone", self.folders["u"])
        self.orphans |= self.kept.pop("gone")
        self.add(lake.table("u"), gone)
        self.add(lake.table("u"), [], removed=gone)
        self._expire("u")
        days_ago(45)  # the state at the horizon: no younger commit names a file of this table
        lake.create("last")
        self.folders["last"] = lake.table_folder("last")
        self.add(lake.table("last"), self.paths("state at the horizon", self.folders["last"]))
        days_ago(40)
        lake.create("w")
        days_ago(20)
        lake.lake.catalog().drop_table((lake.namespace, "last"))
        commit = self.paths("commit within the horizon", self.folders["t"])
        self.add(lake.table(), commit)
        self.add(lake.table(), [], removed=commit)
        self._expire("t")
        self._expire("u")
        lake.branch(WRITER)
        lake.branch("publish-00000000-0000-4000-8000-000000000002")
        lake.branch("of-a-stranger")
        for ref, kind in (
            ("publish-00000000-0000-4000-8000-000000000002", "publication branch"),
            ("of-a-stranger", "branch of a stranger"),
        ):
            self.add(lake.table("u", ref), self.paths(kind, self.folders["u"]))
        lake.branch("run-00000000-0000-4000-8000-000000000003")
        self.add(
            lake.table("t", "run-00000000-0000-4000-8000-000000000003"),
            self.paths("discarded tag", self.folders["t"]),
        )
        lake.tag("discarded-00000000-0000-4000-8000-000000000003", "run-00000000-0000-4000-8000-000000000003")
        lake.delete("run-00000000-0000-4000-8000-000000000003")
        self.add(lake.table(), self.paths("head of main", self.folders["t"]))
        self.add(lake.table("u"), self.paths("another table", self.folders["t"]))
        self._statistics()
        self.written_lately = self.paths("living writer", self.folders["t"])
        self.young = self.paths("young", self.folders["t"])
        self.orphans |= {*self.paths("none", self.folders["t"])}
        del self.kept["none"]
        self.orphans |= {*self.paths("none, dropped", self.folders["dropped"])}
        del self.kept["none, dropped"]
        lake.age(60)
        lake.age(15, only=self.written_lately)
        lake.age(6, only=self.young)
        lake.heartbeats.beat(WRITER)

    def _expire(self, name: str) -> None:
        table = self.lake.table(name)
        table.maintenance.expire_snapshots().by_ids(
            [one.snapshot_id for one in table.metadata.snapshots[:-1]]
        ).commit()

    def _statistics(self) -> None:
        table = self.lake.table()
        paths = self.paths("statistics", self.folders["t"])
        last = self.random.choice(paths)
        self.orphans |= {*paths} - {last}
        self.kept["statistics"] = {last}
        snapshot_id = table.metadata.current_snapshot_id
        assert snapshot_id is not None
        with table.update_statistics() as update:
            update.set_statistics(
                StatisticsFile(
                    snapshot_id=snapshot_id,
                    statistics_path=self.spelled(last),
                    file_size_in_bytes=1,
                    file_footer_size_in_bytes=1,
                    blob_metadata=[],
                )
            )

    def wrongly_deleted(self) -> dict[str, int]:
        """The number of kept files that are gone, by kind."""
        counts = {kind: sum(not Path(path).exists() for path in paths) for kind, paths in self.kept.items()}
        return {kind: count for kind, count in counts.items() if count}

    def left(self) -> int:
        """The number of orphans that still exist."""
        return sum(Path(path).exists() for path in self.orphans)


def test_exactly_the_files_without_a_root_are_deleted(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    scene = Scene(tmp_path, seed, per_kind=300)
    assert len(scene.kept) == 13
    assert sum(map(len, scene.kept.values())) + len(scene.orphans) > 4000
    scene.lake.collect()
    assert scene.wrongly_deleted() == {}, seed
    assert scene.left() == 0, seed


# -- planted bugs --------------------------------------------------------------------------------------


def forget_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = LiveHistory._walk

    def walk_branches(self: LiveHistory, ref: Reference) -> None:
        if ref.type == "BRANCH":
            walk(self, ref)

    monkeypatch.setattr(LiveHistory, "_walk", walk_branches)


def forget_own_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = LiveHistory._walk

    def walk_others(self: LiveHistory, ref: Reference) -> None:
        if not ref.name.startswith("publish-"):
            walk(self, ref)

    monkeypatch.setattr(LiveHistory, "_walk", walk_others)


def read_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk_head(self: LiveHistory, ref: Reference) -> None:
        self._add_listing(ref.hash, ref.name)

    monkeypatch.setattr(LiveHistory, "_walk", walk_head)


def forget_the_state_at_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveHistory, "_add_listing", lambda *_: None)


def forget_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = reachable_files.parse_state

    def parse_without(metadata: object) -> StateFiles:
        state = parse(metadata)  # type: ignore[arg-type]
        return StateFiles(state.manifest_lists, state.manifests, (), state.folders)

    monkeypatch.setattr(reachable_files, "parse_state", parse_without)


def ignore_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_claims(monkeypatch)  # the writer may have written the young files
    monkeypatch.setattr(OrphanRule, "newest_change_us", 1 << 62)


def ignore_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    none: list[WriterClaim] = []
    monkeypatch.setattr(collector_module, "load_claims", lambda *_: none)


def compare_spellings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchlake_dagster.garbage_collection.location_keys.canonical_location", lambda p: p)


def forget_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ReachableFiles.add_states

    def add_some(self: ReachableFiles, states: list[live_history.LiveState]) -> None:
        add(self, [state for state in states if state.key[-1] == "t"])

    monkeypatch.setattr(ReachableFiles, "add_states", add_some)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (forget_tags, {"tag", "tag, older", "dropped table of a tag", "discarded tag"}),
        (forget_own_branches, {"publication branch"}),
        (read_heads_alone, {"commit within the horizon", "state at the horizon"}),
        (forget_the_state_at_the_horizon, {"state at the horizon"}),
        (forget_statistics, {"statistics"}),
        (ignore_the_grace, {"young"}),
        (ignore_claims, {"living writer"}),
        (compare_spellings_literally, {"head of main", "tag"}),
        (forget_other_tables, {"another table"}),
    ],
)
def test_a_planted_bug_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: set[str],
) -> None:
    seed = random.randrange(1 << 32)
    scene = Scene(tmp_path, seed, per_kind=12)
    plant(monkeypatch)
    scene.lake.collect()
    assert expected <= scene.wrongly_deleted().keys(), seed
