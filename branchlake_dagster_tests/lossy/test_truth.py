"""The verification finds what it looks for: each wrong that is put in is told, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.runs.run_tags import RunLocation, build_opening_tags
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.lossy.plan import plan
from branchlake_dagster_tests.lossy.project import KIND
from branchlake_dagster_tests.lossy.truth import World


@dataclass(frozen=True)
class Told(World):
    """A world whose tables are given."""

    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [dict(row) for row in self.tables.get(table, ())]


def run(
    run_id: str, kind: str, publication: str | None, *, success: bool = True, **tags: str
) -> dg.DagsterRun:
    place = build_opening_tags(run_id, RunLocation(f"run-{run_id}", "base"), {})
    told = {RunTag.VERDICT: "passed" if publication else "blocked"}
    shown = {RunTag.PUBLICATION: publication} if publication else {}
    status = dg.DagsterRunStatus.SUCCESS if success else dg.DagsterRunStatus.FAILURE
    return dg.DagsterRun(kind, run_id, status=status, tags={**place, **told, **shown, **tags, KIND: kind})


def published(run_id: str, commit: str) -> Publication:
    return Publication(f"run-{run_id}", run_id, run_id, "passed", "base", (), commit)


def problems(
    runs: Sequence[dg.DagsterRun], ledger: Sequence[Publication], **tables: list[dict[str, Any]]
) -> list[str]:
    world = Told(None, None, {one.run_id: one for one in runs}, ledger, tables)
    return [*world._ledger(), *world._rows(), *world._verdicts()]


ONE = [{"token": "a"}]
PARTS: dict[str, Any] = {"dagster/partition": "p0"}


def test_a_right_world_has_no_problems() -> None:
    runs = [run("a", "append", "1"), run("b", "append", None, success=False)]
    assert problems(runs, [published("a", "1")], shared=ONE, beside=ONE) == []


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"shared": ONE}, "beside lacks 1 of a"),
        ({"shared": ONE * 2, "beside": ONE}, "shared has 1 of a"),
        ({"shared": [*ONE, {"token": "b"}], "beside": ONE}, "shared has 1 of b"),
    ],
)
def test_rows_that_are_lost_doubled_or_leaked(tables: dict[str, Any], told: str) -> None:
    runs = [run("a", "append", "1"), run("b", "append", None, success=False)]
    assert problems(runs, [published("a", "1")], **tables) == [told]


def test_the_newest_of_a_replaced_partition_counts() -> None:
    runs = [run("a", "replace", "1", **PARTS), run("b", "replace", "2", **PARTS)]
    ledger = [published("a", "1"), published("b", "2")]
    assert problems(runs, ledger, parts=[{"token": "b"}]) == []
    assert problems(runs, ledger, parts=ONE) == ["parts lacks 1 of b", "parts has 1 of a"]


def test_tags_that_contradict_main() -> None:
    (lie,) = problems([run("a", "append", "2")], [published("a", "1")], shared=ONE, beside=ONE)
    assert "says it was published as 2; main says 1" in lie
    (untold, _) = problems([run("a", "append", None)], [published("a", "1")], shared=ONE, beside=ONE)
    assert "says it was published as none; main says 1" in untold
    twice = problems([run("a", "append", "1")], [published("a", "1")] * 2, shared=ONE * 2, beside=ONE * 2)
    assert twice == ["run a was published 2 times"]


def test_a_passed_run_without_conflicts_is_published() -> None:
    (told,) = problems([run("a", "append", None)], [])
    assert "passed and was not published" in told
    assert problems([run("a", "replace", None, **PARTS)], []) == []


def test_a_serializable_run_saw_all_that_came_before_it() -> None:
    runs = [run("w", "watch", "1"), run("s", "strict", "2")]
    ledger, watched = [published("w", "1"), published("s", "2")], [{"token": "w"}]
    assert problems(runs, ledger, watched=watched, strict=[{"token": "s", "seen": 1}]) == []
    (told,) = problems(runs, ledger, watched=watched, strict=[{"token": "s", "seen": 0}])
    assert told == "s is serializable and saw 0 rows of 1"


def test_a_plan_is_fixed_by_its_seed_and_has_each_kind() -> None:
    assert list(plan(1, 50)) == list(plan(1, 50)) != list(plan(2, 50))
    assert {one.kind for one in plan(1, 8)} == {one.kind for one in plan(1, 500)}
