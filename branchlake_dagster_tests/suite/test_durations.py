from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster_tests.suite.durations import (
    FOLDER,
    FileRecord,
    expected_s,
    read,
    recorded,
    seconds_of,
    write,
)

RECORD = {"a.py": FileRecord(0.2, {"test_long[x/y::z]": 12.5}), "b.py": FileRecord(0.4, {})}


@pytest.mark.parametrize(
    ("test", "seconds"),
    [
        ("a.py::test_long[x/y::z]", 12.5),
        ("a.py::test_new", 0.2),
        ("new.py::test_new", pytest.approx(0.3)),
    ],
)
def test_a_new_test_takes_the_mean_of_its_file(test: str, seconds: float) -> None:
    assert expected_s(RECORD, f"{FOLDER}{test}") == seconds
    assert expected_s({}, f"{FOLDER}{test}") == 0


def test_files_that_did_not_run_keep_their_record() -> None:
    run = {f"{FOLDER}b.py::TestA::test_b": 4.04, f"{FOLDER}b.py::test_c": 0.1, f"{FOLDER}b.py::test_d": 0.3}
    assert recorded(run, RECORD) == {
        "a.py": RECORD["a.py"],
        "b.py": FileRecord(0.2, {"TestA::test_b": 4.0}),
    }
    assert recorded({f"{FOLDER}c.py::test": 3.0}, {}) == {"c.py": FileRecord(3.0, {"test": 3.0})}


def test_what_is_written_is_read_without_files_that_are_gone(tmp_path: Path) -> None:
    here = "suite/test_durations.py"
    write({here: RECORD["a.py"], "gone.py": RECORD["b.py"]}, tmp_path / "durations.json")
    assert read(tmp_path / "durations.json") == {here: RECORD["a.py"]}


def test_a_report_of_pytest_is_read(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    module = "branchlake_dagster_tests.suite.test_durations"
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        f'<testcase classname="{module}" name="test_a[x.y]" time="1.5"/>'
        f'<testcase classname="{module}.TestB" name="test_b" time="0.25"/>'
        '<testcase classname="" name="nowhere" time="9"/><testcase classname="gone.test" name="x" time="9"/>'
        "</testsuite></testsuites>"
    )
    file = f"{FOLDER}suite/test_durations.py"
    assert seconds_of(report) == {f"{file}::test_a[x.y]": 1.5, f"{file}::TestB::test_b": 0.25}


def test_each_recorded_file_existed() -> None:
    assert all(file.endswith(".py") for file in read())
