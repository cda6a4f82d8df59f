"""How long tests took: `durations.json`, by which the longest are begun with.

`make durations` writes it from the report of the last `make test`. It need not be up to date: only the order of
tests follows from it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree as Xml

FOLDER = "branchlake_dagster_tests/"
"""Where node ids begin, and where `durations.json` names no more what it is about."""
_ROOT = Path(__file__).parents[2]
_FILE = Path(__file__).with_name("durations.json")
_LONG_S = 1.0
"""Tests that take less are recorded by the mean of their file."""


@dataclass(frozen=True)
class FileRecord:
    """One file of tests: the seconds of its long tests, by name, and the mean of the others."""

    mean_s: float
    long_s: Mapping[str, float]


Record = Mapping[str, FileRecord]
"""File, relative to the tests' folder -> its record."""


def split(nodeid: str) -> tuple[str, str]:
    """A node id as file, relative to the tests' folder, and test."""
    file, _, test = nodeid.partition("::")
    return file.removeprefix(FOLDER), test


def expected_s(record: Record, nodeid: str) -> float:
    """The seconds of a test: its own, else its file's mean, else the mean of all files."""
    file, test = split(nodeid)
    if (found := record.get(file)) is None:
        return fmean([one.mean_s for one in record.values()] or [0.0])
    return found.long_s.get(test, found.mean_s)


def recorded(seconds: Mapping[str, float], before: Record) -> dict[str, FileRecord]:
    """The record of a run, from node ids to seconds. Files that it did not run keep what they had `before`."""
    files: dict[str, dict[str, float]] = defaultdict(dict)
    for nodeid, took in seconds.items():
        file, test = split(nodeid)
        files[file][test] = took
    made = dict(before)
    for file, tests in files.items():
        long = {name: round(took, 1) for name, took in sorted(tests.items()) if took >= _LONG_S}
        others = [took for name, took in tests.items() if name not in long]
        made[file] = FileRecord(round(fmean(others or tests.values()), 3), long)
    return dict(sorted(made.items()))


def read(path: Path = _FILE) -> Record:
    """The record as it is in the repository."""
    return {file: FileRecord(one["mean"], one["long"]) for file, one in json.loads(path.read_text()).items()}


def write(record: Record, path: Path = _FILE) -> None:
    """Replace the record, without files that are gone."""
    told = {
        file: {"mean": one.mean_s, "long": dict(one.long_s)}
        for file, one in record.items()
        if (_ROOT / FOLDER / file).is_file()
    }
    path.write_text(json.dumps(told, indent=1) + "\n")


def seconds_of(report: Path) -> dict[str, float]:
    """Node ids and seconds from a report that `pytest --junitxml` wrote."""
    found: dict[str, float] = {}
    for case in Xml.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        for length in range(len(parts), 0, -1):
            file = "/".join(parts[:length]) + ".py"
            if (_ROOT / file).is_file():
                nodeid = "::".join([file, *parts[length:], case.attrib["name"]])
                found[nodeid] = found.get(nodeid, 0.0) + float(case.attrib["time"])
    return found


def main(arguments: Sequence[str]) -> int:
    """Record what the given reports say."""
    record: Record = read()
    for report in arguments:
        record = recorded(seconds_of(Path(report)), record)
    write(record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
