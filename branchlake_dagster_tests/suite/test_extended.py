"""Which tests `make test` leaves out, and how they are chosen."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from branchlake_dagster_tests.suite.extended import MARKER, choose_extended, read_list, read_reached
from branchlake_dagster_tests.suite.soak import COLLECTED


def reached(**numbers: list[int]) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {test.replace("__", ".py::"): np.array(found, dtype=np.int64) for test, found in numbers.items()}


SECONDS = {"a.py::short": 0.1, "a.py::wide": 9.0, "a.py::twice": 5.0, "a.py::alone": 30.0, "b.py::only": 8.0}
REACHED = reached(a__short=[1], a__wide=[1, 2, 3], a__twice=[2], a__alone=[4], b__only=[1])


@pytest.mark.parametrize(
    ("budget_s", "extended"),
    [
        (60.0, {"a.py::twice"}),
        (47.0, {"a.py::twice", "a.py::alone"}),
        (17.0, {"a.py::wide", "a.py::alone"}),
        (0.0, {"a.py::wide", "a.py::twice", "a.py::alone"}),
    ],
)
def test_what_remains_reaches_the_most_for_its_time(budget_s: float, extended: set[str]) -> None:
    assert choose_extended(SECONDS, REACHED, budget_s=budget_s) == extended


def test_what_is_kept_remains() -> None:
    kept = ["a.py::twice", "a.py::gone"]
    assert choose_extended(SECONDS, REACHED, budget_s=0, kept=kept) == {"a.py::wide", "a.py::alone"}


def test_the_longest_are_left_out_unless_they_are_kept() -> None:
    seconds = {"a.py::x": 50.0, "b.py::y": 60.0, "c.py::text": 70.0, "d.py::z": 30.0}
    found = reached(a__x=[1], b__y=[2], d__z=[3])
    extended = {"a.py::x", "c.py::text"}
    assert choose_extended(seconds, found, kept=["b.py::y"], budget_s=900, longest_s=40) == extended


def test_the_shortest_of_a_file_and_those_that_reach_nothing_remain() -> None:
    seconds = {"a.py::x": 3.0, "a.py::y": 2.0, "a.py::text": 4.0}
    assert choose_extended(seconds, reached(a__x=[1], a__y=[1]), budget_s=0) == {"a.py::x"}


def test_branches_are_read_by_test(tmp_path: Path) -> None:
    files = [tmp_path / "data.1", tmp_path / "data.2"]
    for file, folder in zip(files, ("", "nessie/"), strict=True):
        with sqlite3.connect(file) as database:
            database.executescript(
                f"""
                CREATE TABLE context (id, context); CREATE TABLE file (id, path);
                CREATE TABLE arc (file_id, context_id, fromno, tono);
                INSERT INTO file VALUES (1, 'package/a.py');
                INSERT INTO context VALUES (1, ''), (2, 'branchlake_dagster_tests/{folder}test_a.py::test[x|run]|run');
                INSERT INTO context VALUES (3, 'branchlake_dagster_tests/{folder}test_a.py::test[y]|setup');
                INSERT INTO arc VALUES (1, 1, 5, 6), (1, 2, 5, 6), (1, 2, 6, 7), (1, 3, 5, 6);
                """
            )
    found = {test: numbers.tolist() for test, numbers in read_reached(files).items()}
    assert found == {
        f"{folder}test_a.py::test[{case}]": numbers
        for folder in ("", "nessie/")
        for case, numbers in (("x|run", [0, 1]), ("y", [0]))
    }


def test_each_extended_test_exists(pytestconfig: pytest.Config) -> None:
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("single tests were asked for")
    collected = pytestconfig.stash[COLLECTED]
    files = {one.partition("::")[0] for one in collected}
    assert all((Path(__file__).parents[1] / one.partition("::")[0]).is_file() for one in read_list())
    assert {one for one in read_list() if one.partition("::")[0] in files} <= collected


def test_extended_tests_are_marked(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        name = item.nodeid.removeprefix("branchlake_dagster_tests/")
        assert (item.get_closest_marker(MARKER) is not None) == (name in read_list())
