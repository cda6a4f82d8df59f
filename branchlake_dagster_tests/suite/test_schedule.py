from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster_tests.suite.durations import FOLDER, FileRecord, read
from branchlake_dagster_tests.suite.schedule import SPREAD, arranged, module_of, scope_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("module", sorted(SPREAD))
def test_the_named_modules_exist(module: str) -> None:
    assert (TESTS / module).is_file()


def test_a_module_goes_to_one_worker_and_a_long_one_to_several() -> None:
    module, spread = "query/test_names.py", sorted(SPREAD)[0]
    assert module_of(f"{FOLDER}{module}::test_a[x/y::z]") == module
    assert scope_of(f"{FOLDER}{module}::test_a") == scope_of(f"{FOLDER}{module}::test_b") == module
    assert scope_of(f"{FOLDER}{spread}::test_a") != scope_of(f"{FOLDER}{spread}::test_b")


@pytest.mark.parametrize("module", sorted(SPREAD))
def test_what_is_spread_makes_nothing_for_the_module(module: str) -> None:
    assert 'scope="module"' not in (TESTS / module).read_text()


def test_the_longest_module_is_first_and_keeps_its_sequence() -> None:
    record = {"a.py": FileRecord(0.1, {"slow": 3.0}), "b.py": FileRecord(1.0, {})}
    tests = ["a.py::quick", "b.py::one", "b.py::two", "a.py::slow", "new.py::x", "b.py::three"]
    assert arranged([f"{FOLDER}{one}" for one in tests], record) == [
        f"{FOLDER}{one}"
        for one in ("a.py::quick", "a.py::slow", "b.py::one", "b.py::two", "b.py::three", "new.py::x")
    ]


def test_the_longest_test_of_a_spread_module_is_first() -> None:
    spread = f"{FOLDER}{sorted(SPREAD)[0]}"
    record = {spread.removeprefix(FOLDER): FileRecord(0.1, {"slow": 3.0}), "b.py": FileRecord(1.0, {})}
    tests = [f"{spread}::quick", f"{FOLDER}b.py::one", f"{spread}::slow"]
    assert arranged(tests, record) == [tests[2], tests[1], tests[0]]


def test_what_is_collected_is_arranged_by_the_record(request: pytest.FixtureRequest) -> None:
    nodeids = [item.nodeid for item in request.session.items]
    assert arranged(nodeids, read()) == nodeids
