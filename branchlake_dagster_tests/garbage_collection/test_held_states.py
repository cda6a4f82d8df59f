"""A state that a reader holds stays readable beside the collection, and no longer than its end."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from branchlake_dagster.errors import ConfigurationError, MomentExpired, NoSuchState
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, CollectedLake, open_lake
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture
def lake(tmp_path: Path) -> CollectedLake:
    """A lake whose table `t` has a state that is older than the horizon, at the commit `old_commit`."""
    lake = open_lake(tmp_path)
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create()
    lake.append(1)
    return lake


@pytest.fixture
def old_commit(lake: CollectedLake) -> str:
    commit = lake.nessie.reference(MAIN).hash
    for days, number in ((40, 2), (0, 3)):
        lake.at(datetime.now(UTC) - days * DAY)
        lake.append(number)
    lake.age(58)
    return commit


def reading_tags(lake: CollectedLake) -> list[str]:
    return [tag.name for tag in lake.nessie.references() if tag.name.startswith("reading-")]


def test_the_collection_keeps_a_held_state(lake: CollectedLake, old_commit: str) -> None:
    reader = LakeReader(lake.lake)
    lake.collector(ago=2 * DAY).run()  # plans to delete the metadata file of the old state
    with reader.hold_state(at=old_commit, hours=6) as tag:
        lake.collector().run()
        assert reader.sql("SELECT n FROM shop.t", branch=tag).arrow()["n"].to_pylist() == [1]
        assert reader.table("shop.t", at=old_commit).scan().to_arrow()["n"].to_pylist() == [1]
    assert reading_tags(lake) == []
    lake.collect()
    with pytest.raises(MomentExpired):
        reader.table("shop.t", at=old_commit)


def test_the_collection_deletes_the_tag_of_a_killed_reader_after_its_end(
    lake: CollectedLake, old_commit: str
) -> None:
    reader = LakeReader(lake.lake, now=lambda: datetime.now(UTC) - 3 * DAY)
    killed = ExitStack()
    killed.enter_context(reader.hold_state(at=old_commit, hours=6))
    assert len(reading_tags(lake)) == 1
    lake.collector().plan()
    assert len(reading_tags(lake)) == 1  # a plan changes nothing
    lake.collect()
    assert reading_tags(lake) == []
    killed.close()
    with pytest.raises(MomentExpired):
        reader.table("shop.t", at=old_commit)


def test_a_held_state_does_not_move(lake: CollectedLake) -> None:
    reader = LakeReader(lake.lake)
    lake.branch("experiment")
    with reader.hold_state(branch="experiment") as tag:
        lake.append(2, ref="experiment")
        lake.delete("experiment")
        assert reader.polars("shop.t", branch=tag).collect()["n"].to_list() == [1]
    assert lake.rows() == [1]


@pytest.mark.parametrize("hours", [0, -1, 169, float("nan"), float("inf")])
def test_hours_are_bounded(lake: CollectedLake, hours: float) -> None:
    with (
        raising(ConfigurationError, reason="hold_hours", subject=str(hours)),
        LakeReader(lake.lake).hold_state(hours=hours),
    ):
        pass


def test_a_commit_that_its_branch_does_not_have(lake: CollectedLake) -> None:
    state = f"{MAIN}@{'ab' * 32}"
    with (
        raising(NoSuchState, reason="state_gone", subject=state),
        LakeReader(lake.lake).hold_state(branch=state),
    ):
        pass
    assert reading_tags(lake) == []
