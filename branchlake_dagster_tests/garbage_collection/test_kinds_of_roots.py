"""Thousands of files, each reachable by exactly one kind of root or by none: the right ones are deleted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyiceberg.io import FileIO

from branchlake_dagster.expiry.roots import LakeRoots, RootsReader
from branchlake_dagster.garbage_collection import candidate_spool, live_history, reachable_files
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection.live_history import LiveHistory
from branchlake_dagster.garbage_collection.orphan_rule import OrphanRule
from branchlake_dagster.garbage_collection.reachable_files import ManifestPaths, ReachableFiles, StateFiles
from branchlake_dagster.garbage_collection.writer_claims import WriterClaim
from branchlake_dagster.nessie.model import Content, OtherContent, Reference
from branchlake_dagster_tests.garbage_collection.collected_lake import SavedLake
from branchlake_dagster_tests.garbage_collection.root_scene import RootScene
from branchlake_dagster_tests.suite.soak import soaking

PER_KIND = 360 if soaking() else 130
"""Files of each kind: more than 10,000 in all, or more than 4,000."""


def choose_seed() -> int:
    """Return the seed of the environment, or a random one, and print it."""
    seed = int(os.environ.get("BRANCHLAKE_TEST_ROOTS_SEED") or random.randrange(1 << 32))
    print(f"BRANCHLAKE_TEST_ROOTS_SEED={seed}")  # noqa: T201 - pytest shows it if the test fails
    return seed


def test_exactly_the_files_without_a_root_are_deleted(tmp_path: Path) -> None:
    seed = choose_seed()
    with RootScene(tmp_path, seed, PER_KIND) as scene:
        assert (len(scene.kept), len(scene.orphans)) == (28, 7)
        assert scene.file_count > (10_000 if soaking() else 4_000)
        metadata, change_tables = scene.find_unreachable_metadata(), scene.change_table_files()
        assert len(metadata) > 20
        deleted = scene.lake.collect()
        assert (scene.count_lost(deleted), scene.count_left(deleted)) == ({}, {}), seed
        assert deleted == metadata.union(*scene.orphans.values()), seed
        assert scene.change_table_files() == change_tables != set()


# -- planted bugs --------------------------------------------------------------------------------------


def forget_references(prefix: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a collector that ignores references whose names begin with `prefix`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        walk = LiveHistory._walk

        def walk_others(self: LiveHistory, ref: Reference) -> None:
            if not ref.name.startswith(prefix):
                walk(self, ref)

        monkeypatch.setattr(LiveHistory, "_walk", walk_others)

    return plant


def forget_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = LiveHistory._walk

    def walk_branches(self: LiveHistory, ref: Reference) -> None:
        if ref.type == "BRANCH":
            walk(self, ref)

    monkeypatch.setattr(LiveHistory, "_walk", walk_branches)


def read_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk_head(self: LiveHistory, ref: Reference) -> None:
        self._add_listing(ref.hash, ref.name)

    monkeypatch.setattr(LiveHistory, "_walk", walk_head)


def forget_the_state_at_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveHistory, "_add_listing", lambda *_: None)


def forget_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = reachable_files.parse_state

    def parse_without(metadata: object) -> StateFiles:
        state = parse(metadata)
        return StateFiles(state.manifest_lists, state.manifests, (), state.folders)

    monkeypatch.setattr(reachable_files, "parse_state", parse_without)


def forget_delete_files(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reachable_files.read_manifest_paths

    def read_data_files(io: FileIO, location: str, length: int) -> ManifestPaths:
        paths = read(io, location, length)
        return replace(paths, live=paths.live.filter(~paths.live.str.contains("delete-files")))

    monkeypatch.setattr(reachable_files, "read_manifest_paths", read_data_files)


def forget_views(monkeypatch: pytest.MonkeyPatch) -> None:
    locate = live_history.content_locations

    def locate_others(content: Content) -> tuple[tuple[str, str], ...]:
        is_view = isinstance(content, OtherContent) and content.type == "ICEBERG_VIEW"
        return () if is_view else locate(content)

    monkeypatch.setattr(live_history, "content_locations", locate_others)


def forget_unknown_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReachableFiles, "_protect", lambda *_: None)


def forget_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LakeRoots, "positions_of", lambda *_: [])


def forget_the_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootsReader, "_add_horizon", lambda *_: None)


def forget_hidden_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_spool, "find_hidden", lambda paths: np.zeros(len(paths), np.bool_))


def ignore_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_claims(monkeypatch)  # the writer may have written the young files
    monkeypatch.setattr(OrphanRule, "newest_change_us", 1 << 62)


def ignore_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    none: list[WriterClaim] = []
    monkeypatch.setattr(collector_module, "load_claims", lambda *_: none)


def compare_spellings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchlake_dagster.tables.location_keys.canonical_location", lambda p: p)


def forget_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ReachableFiles.add_states

    def add_some(self: ReachableFiles, states: list[live_history.LiveState]) -> None:
        add(self, [state for state in states if state.key[-1] == "t"])

    monkeypatch.setattr(ReachableFiles, "add_states", add_some)


@pytest.fixture(scope="module")
def built_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RootScene, SavedLake, int]]:
    """A scene that the tests of planted bugs share, its copy, and its seed."""
    seed = choose_seed()
    with RootScene(tmp_path_factory.mktemp("scene"), seed, per_kind=12) as scene:
        yield scene, SavedLake(scene.lake), seed


@pytest.fixture
def scene(built_scene: tuple[RootScene, SavedLake, int]) -> RootScene:
    """The shared scene as it was built, whatever was deleted before."""
    scene, saved, seed = built_scene
    saved.restore()
    print(f"BRANCHLAKE_TEST_ROOTS_SEED={seed}")  # noqa: T201 - pytest shows it if the test fails
    return scene


TAGS = {
    "tag",
    "tag, older snapshot",
    "dropped table of a tag",
    "tag of a discarded run",
    "tag of a sweeper",
    "tag of a judged run",
    "lease of a reader",
    "restoration of a table",
}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        pytest.param(
            forget_references("release-"),
            {"tag", "tag, older snapshot"},
            id="tag of a user",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            forget_references("before-"),
            {"dropped table of a tag"},
            id="tag of a dropped table",
            marks=pytest.mark.soak,
        ),
        pytest.param(forget_references("run-"), {"branch of an open run", "change table"}, id="run-"),
        pytest.param(forget_references("publish-"), {"branch of a publication"}, id="publish-"),
        pytest.param(forget_references("compact-"), {"branch of a compaction"}, id="compact-"),
        pytest.param(forget_references("of-a-"), {"branch of a stranger"}, id="other branch"),
        pytest.param(
            forget_references("discarded-"),
            {"tag of a discarded run"},
            id="discarded-",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            forget_references("sweeping-"), {"tag of a sweeper"}, id="sweeping-", marks=pytest.mark.soak
        ),
        pytest.param(
            forget_references("judged-"), {"tag of a judged run"}, id="judged-", marks=pytest.mark.soak
        ),
        pytest.param(forget_references("reading-"), {"lease of a reader"}, id="reading-"),
        pytest.param(
            forget_references("undrop-"), {"restoration of a table"}, id="undrop-", marks=pytest.mark.soak
        ),
        (forget_tags, TAGS),
        (read_heads_alone, {"commit within the horizon", "state at the horizon"}),
        (forget_the_state_at_the_horizon, {"state at the horizon"}),
        (forget_statistics, {"statistics", "partition statistics"}),
        (forget_delete_files, {"delete files"}),
        (forget_views, {"view"}),
        (forget_unknown_contents, {"content of an unknown type"}),
        (forget_hidden_names, {"hidden"}),
        (ignore_the_grace, {"young", "living writer"}),
        (ignore_claims, {"living writer"}),
    ],
)
def test_a_planted_bug_costs_exactly_the_files_of_its_kind(
    scene: RootScene,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: set[str],
) -> None:
    plant(monkeypatch)
    deleted = scene.lake.collect()
    assert scene.count_lost(deleted).keys() == expected
    assert scene.count_left(deleted) == {}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [(forget_positions, {"position of a consumer"}), (forget_the_undo, {"horizon of undo"})],
)
def test_a_planted_bug_of_expiries_costs_exactly_the_files_of_its_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: set[str],
) -> None:
    """The expiries are a part of the scene, so it is built with the bug."""
    plant(monkeypatch)
    seed = choose_seed()
    with RootScene(tmp_path, seed, per_kind=3) as scene:
        deleted = scene.lake.collect()
        assert scene.count_lost(deleted).keys() == expected, seed
        assert scene.count_left(deleted) == {}, seed


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (compare_spellings_literally, {"head of main", "tag"}),
        (forget_other_tables, {"another table"}),
    ],
)
def test_a_planted_bug_of_all_kinds_is_noticed(
    scene: RootScene,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: set[str],
) -> None:
    plant(monkeypatch)
    assert expected <= scene.count_lost(scene.lake.collect()).keys()


def test_an_ended_lease_that_still_counts_is_noticed(
    scene: RootScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "remove_ended_tags", lambda *_: [])
    assert scene.count_left(scene.lake.collect()).keys() == {"ended lease of a reader"}
