"""Spellings, sets of keys, horizons, the rule and the settings, without a lake."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from branchlake_dagster.garbage_collection.candidate_spool import CandidateSpool
from branchlake_dagster.garbage_collection.collection_plan import CollectionRules, PlannedFile, plan_digest
from branchlake_dagster.garbage_collection.collector import select_folders
from branchlake_dagster.garbage_collection.live_history import HistoryHorizon, content_locations
from branchlake_dagster.garbage_collection.orphan_rule import FileVerdict, OrphanRule, find_hidden
from branchlake_dagster.garbage_collection.reachable_files import RemovedFiles, parse_state
from branchlake_dagster.garbage_collection.warehouse_files import (
    ListedFile,
    WarehouseFiles,
    to_microseconds,
    to_time,
)
from branchlake_dagster.garbage_collection.writer_claims import (
    CLOCK_TOLERANCE,
    WriterClaim,
    load_claims,
)
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import (
    IcebergTable,
    Namespace,
    OtherContent,
    Reference,
    ReferenceMetadata,
    ReferenceType,
)
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.location_keys import (
    KeySet,
    LocationKeyer,
    canonical_location,
    split_scheme,
)

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3a://b/k/x.parquet", "s3://b/k/x.parquet"),
        ("s3n://B/k/x.parquet", "S3://b//k/x.parquet"),
        ("s3://b/k/a%20b", "s3://b/k/a b"),
        ("s3://b/k/a%2520b", "s3://b/k/a%20b"),
        ("s3://b/k/t=10%3A00", "s3://b/k/t=10:00"),
        ("s3://b/k%2Fx", "s3://b/k/x"),
        ("s3://b/k/a+b", "s3://b/k/a b"),
        ("s3://b/k/./x", "s3://b/k/x"),
        ("s3://b/k/z/../x", "s3://b/k/x"),
        ("file:/t/x", "file:///t/x"),
        ("file:/t/x", "/t/x"),
        ("file://localhost/t/x", "/t//x"),
        ("abfss://c@h/x", "wasb://c@h/x"),
        ("/t/\u00e4", "file:/t/a\u0308"),
        ("/t/%C3%A4", "/t/\u00e4"),
    ],
)
def test_spellings_of_one_file(one: str, other: str) -> None:
    keys = LocationKeyer().keys([one, other])
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/k/x", "s3://b/k/y"),
        ("s3://b/x", "file:/b/x"),
        ("s3://b/k/x", "s3://c/k/x"),
        ("/t/x", "/t/x/"),
    ],
)
def test_other_files_have_other_keys(one: str, other: str) -> None:
    keys = LocationKeyer().keys([one, other])
    assert keys[0] != keys[1]


def test_schemes() -> None:
    assert split_scheme("s3a://b/k") == ("s3", "b/k")
    assert split_scheme("file:/a") == split_scheme("file:///a") == split_scheme("/a") == ("file", "/a")
    assert split_scheme("/a:b/c") == ("file", "/a:b/c")


def test_a_symbolic_link_above_a_file_makes_no_difference(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert canonical_location(f"{tmp_path}/link/x") == canonical_location(f"file:{tmp_path}/real/x")
    keys = LocationKeyer().keys([f"{tmp_path}/link/x", f"file:{tmp_path}/real/x"])
    assert keys[0] == keys[1]


def test_a_set_of_keys_has_exactly_what_was_added() -> None:
    seed = random.randrange(1 << 32)
    numbers = np.random.default_rng(seed)
    keys, added = KeySet(), set()
    assert not keys.contains(np.array([0], np.uint64)).any()
    for _ in range(20):
        part = numbers.integers(0, 1 << 62, 30_000, dtype=np.uint64)
        keys.add(part)
        added |= set(part.tolist())
    questions = np.concatenate(
        [np.array(sorted(added)[:5000], np.uint64), numbers.integers(0, 1 << 62, 5000, dtype=np.uint64)]
    )
    assert keys.contains(questions).tolist() == [one in added for one in questions.tolist()], seed
    assert len(keys) == len(added)


def test_removed_files_are_found_by_their_keys() -> None:
    removed = RemovedFiles()
    assert removed.find(np.array([1], np.uint64)) == [None]
    removed.keys += [np.array([5, 3], np.uint64), np.array([9], np.uint64)]
    removed.snapshot_ids += [np.array([50, 30]), np.array([90])]
    assert removed.find(np.array([3, 4, 9, 10, 5], np.uint64)) == [30, None, 90, None, 50]


def test_horizons_by_pattern() -> None:
    horizon = HistoryHorizon(30 * DAY, (("release-*", 365 * DAY), ("r*", DAY)))
    assert [horizon.duration(name) for name in ("main", "release-1", "run-1")] == [30 * DAY, 365 * DAY, DAY]


def test_locations_of_contents() -> None:
    table = IcebergTable("i", "s3://b/m.json", 1, 0, 0, 0)
    assert content_locations(table) == (("s3://b/m.json", "ICEBERG_TABLE"),)
    assert content_locations(Namespace("i", ("a",), {"location": "s3://b/a"})) == ()
    view = OtherContent(
        "i", "ICEBERG_VIEW", {"metadataLocation": "s3://b/v.json", "dialect": "spark", "n": 1}
    )
    assert content_locations(view) == (("s3://b/v.json", "ICEBERG_VIEW"),)


def test_the_files_of_table_metadata() -> None:
    state = parse_state(
        {
            "format-version": 2,
            "location": "s3://b/t/",
            "properties": {"write.data.path": "s3://b/data", "other": "s3://b/no"},
            "snapshots": [{"manifest-list": "s3://b/l1"}, {"manifests": ["s3://b/m1", "s3://b/m2"]}],
            "statistics": [{"statistics-path": "s3://b/s1"}],
            "partition-statistics": [{"statistics-path": "s3://b/s2"}],
            "metadata-log": [{"metadata-file": "s3://b/old"}],
        }
    )
    assert state.manifest_lists == ("s3://b/l1",)
    assert state.manifests == (("s3://b/m1", 0), ("s3://b/m2", 0))
    assert state.statistics == ("s3://b/s1", "s3://b/s2")
    assert state.folders == ("s3://b/t/", "s3://b/data/")


@pytest.mark.parametrize("path", ["/w/l", "file:/w/l", "s3a://b/l", "abfss://c@a/l", "C:\\w\\l"])
def test_an_absolute_location_is_accepted(path: str) -> None:
    state = parse_state({"format-version": 2, "snapshots": [{"manifest-list": path}]})
    assert state.manifest_lists == (path,)


@pytest.mark.parametrize(
    "fields",
    [
        {"format-version": 4},
        {"format-version": 2, "snapshots": [{"manifest-list": "metadata/l"}]},
        {"format-version": 2, "snapshots": [{"manifest-list": "data/ts=10:00/l"}]},
        {"format-version": 2, "snapshots": [{"manifests": ["/w/m", None]}]},
        {"format-version": 2, "statistics": [{"statistics-path": None}]},
    ],
)
def test_metadata_whose_files_cannot_be_located_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller reports it with the location
        parse_state(fields)


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("data/x.parquet", False),
        ("data/_day=1/x.parquet", False),
        ("data/_tmp/x.parquet", True),
        ("data/.x/x.parquet", True),
        ("data/.x.crc", True),
        ("data/_day=1", True),
        ("_SUCCESS", True),
    ],
)
def test_hidden_files(path: str, hidden: bool) -> None:
    assert find_hidden(pl.Series([path])).tolist() == [hidden]


def judge(rule: OrphanRule, *files: tuple[str, datetime], roots: tuple[str, ...] = ()) -> list[FileVerdict]:
    keyer, reachable = LocationKeyer(), KeySet()
    reachable.add(keyer.keys(list(roots)))
    locations = [path for path, _ in files]
    modified = np.array([to_microseconds(time) for _, time in files], np.int64)
    return rule.judge(keyer.keys(locations), modified, locations, reachable)


def test_the_rule() -> None:
    old = NOW - 20 * DAY
    rule = OrphanRule(
        NOW,
        7 * DAY,
        (WriterClaim("b", "w", NOW - 10 * DAY),),
        frozenset({canonical_location("/w/broken")}),
    )
    assert judge(
        rule,
        ("/w/t/root", old),
        ("/w/t/orphan", old),
        ("/w/t/at", NOW - 7 * DAY),
        ("/w/t/young", NOW - 7 * DAY + timedelta(microseconds=1)),
        ("/w/t/future", NOW + DAY),
        ("/w/t/since", NOW - 9 * DAY),
        ("/w/broken/x", old),
        roots=("file:/w/t/root",),
    ) == [
        FileVerdict.REACHABLE,
        FileVerdict.ORPHAN,
        FileVerdict.CLAIMED,
        FileVerdict.YOUNG,
        FileVerdict.YOUNG,
        FileVerdict.CLAIMED,
        FileVerdict.PROTECTED,
    ]
    unlimited = OrphanRule(NOW, 7 * DAY, (WriterClaim("b", "w", None), WriterClaim("c", "w", NOW)))
    assert judge(unlimited, ("/w/t/x", NOW - 4000 * DAY)) == [FileVerdict.CLAIMED]
    assert judge(OrphanRule(NOW, 7 * DAY), ("/w/t/x", NOW - 7 * DAY)) == [FileVerdict.ORPHAN]


def claim_since(beat: Heartbeat, base: datetime | None = None) -> datetime | None:
    """The time from which on the writer may have written files; its branch started at `base`, or is unknown."""

    def find_branch(*_: object, **__: object) -> Reference:
        if base is None:
            raise ReferenceNotFound("no branch")
        metadata = ReferenceMetadata(1, 0, "1", None, None)
        return Reference(ReferenceType.BRANCH, beat.branch, "0" * 64, metadata)

    commit = SimpleNamespace(commit=SimpleNamespace(commit_time=base))
    client = SimpleNamespace(reference=find_branch, log=lambda *_, **__: [commit])
    (claim,) = load_claims(cast(NessieClient, client), [beat], NOW)
    assert (claim.branch, claim.writer) == (beat.branch, beat.writer)
    return claim.since


def test_a_writer_may_have_written_files_since_its_start_and_its_branchs() -> None:
    hour = CLOCK_TOLERANCE
    beat = Heartbeat("b", "w", "r", written_at=NOW, started_at=NOW - 2 * DAY)
    assert claim_since(beat) == NOW - 2 * DAY - hour
    assert claim_since(beat, NOW - 5 * DAY) == NOW - 2 * DAY - hour
    assert claim_since(beat, NOW - DAY) == NOW - DAY - hour
    without_start = replace(beat, started_at=None)
    assert claim_since(without_start, NOW - 5 * DAY) == NOW - 5 * DAY - hour
    assert claim_since(without_start) is None
    assert claim_since(replace(beat, written_at=None)) is None


def test_the_start_of_a_writer_whose_clock_is_wrong() -> None:
    ahead = Heartbeat("b", "w", "r", written_at=NOW + 9 * DAY, started_at=NOW + 7 * DAY)
    assert claim_since(ahead) == NOW - 2 * DAY - CLOCK_TOLERANCE
    behind = Heartbeat("b", "w", "r", written_at=NOW - 9 * DAY, started_at=NOW - 11 * DAY)
    assert claim_since(behind) == NOW - 11 * DAY - CLOCK_TOLERANCE
    set_back = Heartbeat("b", "w", "r", written_at=NOW, started_at=NOW + DAY)
    assert claim_since(set_back) is None


def test_a_writer_whose_branch_has_no_known_base_may_have_written_any_file() -> None:
    branch = Reference(ReferenceType.BRANCH, "b", "0" * 64, metadata=None)
    client = cast(NessieClient, SimpleNamespace(reference=lambda *_, **__: branch))
    (claim,) = load_claims(client, [Heartbeat("b", "w", "r")], NOW)
    assert claim == WriterClaim("b", "w", None)


def test_times_keep_their_microseconds() -> None:
    moment = NOW + timedelta(microseconds=123_457)
    assert to_time(to_microseconds(moment)) == moment


def test_candidates_come_back_from_disk() -> None:
    keyer = LocationKeyer()
    files = [ListedFile(f"/w/t/{number}", number, number * 10, number * 20) for number in range(20_000)]
    with CandidateSpool(keyer) as spool:
        for file in files:
            spool.add(file, file.size % 7, file.path)
        parts = list(spool)
    assert [path for part in parts for path in part.paths] == [file.path for file in files]
    assert [int(one) for part in parts for one in part.modified_us] == [file.modified_us for file in files]
    assert [int(one) for part in parts for one in part.last_change_us] == [
        file.last_change_us for file in files
    ]
    assert [int(one) for part in parts for one in part.folders] == [file.size % 7 for file in files]
    assert (
        np.concatenate([part.keys for part in parts]).tolist() == keyer.keys([f.path for f in files]).tolist()
    )


def test_a_spool_that_nobody_closes_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = CandidateSpool(LocationKeyer())
    for number in range(10_000):
        spool.add(ListedFile(f"/w/t/{number}", 1, 1, 1), 0, f"/w/t/{number}")
    assert not [*tmp_path.iterdir()]
    with spool:
        assert sum(len(part.paths) for part in spool) == 10_000


def test_folders_inside_others_are_listed_once(tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    files = WarehouseFiles(root, {})
    folders = {
        f"{root}/a/": "a",
        f"{tmp_path}/a/b/": "b",
        f"file:{tmp_path}/a": "a",
        f"{root}/ab/": "ab",
        f"{root}/": "all",
        "file:///elsewhere/": "far",
        f"{root}/_branchlake/x/": "own",
        f"{root}/_branchlake": "own",
        f"{root}/a/../../x": "above",
    }
    assert {canonical_location(folder) for folder in select_folders(folders, files)} == {
        canonical_location(f"{tmp_path}/a"),
        canonical_location(f"{tmp_path}/ab"),
    }


def test_the_digest_of_a_plan_has_all_that_it_does() -> None:
    file = PlannedFile("/a", "t", "unreferenced", 1, 2)
    other = PlannedFile("/b", "t", "unreferenced", 1, 2)
    digest = plan_digest("h", "r", [file, other])
    assert digest == plan_digest("h", "r", [other, file])
    others = [
        plan_digest("h2", "r", [file, other]),
        plan_digest("h", "r2", [file, other]),
        plan_digest("h", "r", [file]),
        plan_digest("h", "r", [file, PlannedFile("/b", "t", "unreferenced", 2, 2)]),
        plan_digest("h", "r", [file, PlannedFile("/b", "t", "unreferenced", 1, 3)]),
    ]
    assert digest not in others
    assert len({CollectionRules().digest, CollectionRules(grace=8 * DAY).digest}) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"orphan_file_grace_h": 23},
        {"deletion_delay_h": 23},
        {"history_horizon_days": 0},
        {"orphan_file_grace_h": 48, "orphan_max_age_h": 72},
        {"history_horizon_days": 8, "discard_grace_h": 200},
        {"history_horizon_days": 8, "keep_failed_hours": 190, "discard_grace_h": 24},
        {"history_horizon_days": 5},
    ],
)
def test_impossible_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Settings(**values)


def test_rules_follow_the_settings() -> None:
    long_runs = Settings(orphan_max_age_h=1000, keep_failed_hours=2000)
    assert long_runs.orphan_file_grace == timedelta(hours=1000)
    assert long_runs.history_horizon == timedelta(hours=2024)
    assert (Settings().orphan_file_grace, Settings().history_horizon) == (
        timedelta(days=7),
        timedelta(days=30),
    )
    settings = Settings(orphan_file_grace_h=48, history_horizon_days=10, deletion_delay_h=36)
    rules = CollectionRules.from_settings(settings, {"x": DAY})
    assert (rules.grace, rules.horizon.default, rules.delay) == (2 * DAY, 10 * DAY, 1.5 * DAY)
    assert rules.horizon.duration("x") == DAY
