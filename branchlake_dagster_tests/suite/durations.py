"""The recorded durations of the tests in `durations.json`, by which the longest tests start first.

`make durations` writes the file from the report of the last `make test`. It may be out of date, because only the
order of the tests depends on it.
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
"""The prefix of all node ids. `durations.json` omits it."""
_ROOT = Path(__file__).parents[2]
_FILE = Path(__file__).with_name("durations.json")
_LONG_S = 1.0
"""Shorter tests are recorded only as the mean of their file."""


@dataclass(frozen=True)
class FileRecord:
    """One file of tests: the seconds of its long tests by name, and the mean of the others."""

    mean_s: float
    long_s: Mapping[str, float]


Record = Mapping[str, FileRecord]
"""File, relative to the tests' folder -> its record."""


def split(nodeid: str) -> tuple[str, str]:
    """Split a node id into the file, relative to the tests' folder, and the test."""
    file, _, test = nodeid.partition("::")
    return file.removeprefix(FOLDER), test


def expected_s(record: Record, nodeid: str) -> float:
    """Return the recorded seconds of a test, else the mean of its file, else the mean of all files."""
    file, test = split(nodeid)
    if (file_record := record.get(file)) is None:
        return fmean([one.mean_s for one in record.values()] or [0.0])
    return file_record.long_s.get(test, file_record.mean_s)


def recorded(seconds: Mapping[str, float], before: Record) -> dict[str, FileRecord]:
    """Return the record after a run that took these seconds by node id. Files that did not run keep their record `before`."""
    files: dict[str, dict[str, float]] = defaultdict(dict)
    for nodeid, took in seconds.items():
        file, test = split(nodeid)
        files[file][test] = took
    record = dict(before)
    for file, tests in files.items():
        long = {name: round(took, 1) for name, took in sorted(tests.items()) if took >= _LONG_S}
        others = [took for name, took in tests.items() if name not in long]
        record[file] = FileRecord(round(fmean(others or tests.values()), 3), long)
    return dict(sorted(record.items()))


def read(path: Path = _FILE) -> Record:
    """Read the record from its file, by default the one in the repository."""
    return {file: FileRecord(one["mean"], one["long"]) for file, one in json.loads(path.read_text()).items()}


def write(record: Record, path: Path = _FILE) -> None:
    """Write the record without files that no longer exist."""
    content = {
        file: {"mean": one.mean_s, "long": dict(one.long_s)}
        for file, one in record.items()
        if (_ROOT / FOLDER / file).is_file()
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def seconds_of(report: Path) -> dict[str, float]:
    """Return the seconds by node id from a report of `pytest --junitxml`."""
    seconds: dict[str, float] = {}
    for case in Xml.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        for length in range(len(parts), 0, -1):
            file = "/".join(parts[:length]) + ".py"
            if (_ROOT / file).is_file():
                nodeid = "::".join([file, *parts[length:], case.attrib["name"]])
                seconds[nodeid] = seconds.get(nodeid, 0.0) + float(case.attrib["time"])
    return seconds


def main(arguments: Sequence[str]) -> int:
    """Record the durations in the given reports."""
    record: Record = read()
    for report in arguments:
        record = recorded(seconds_of(Path(report)), record)
    write(record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
