"""Long tests marked `extended`, which `make test` leaves out to stay short. `make test-extended` runs them, and CI runs both.

`extended.txt` lists them, as chosen by `python -m branchlake_dagster_tests.suite.extended REPORT COVERAGE…` from
measured times and coverage. A new test belongs to `make test` until the list is made anew.
"""

from __future__ import annotations

import heapq
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from branchlake_dagster_tests.suite.durations import FOLDER, seconds_of, split

MARKER = "extended"
BUDGET_S = 1_900.0
"""The largest sum of the times of the tests of `make test`, in seconds, when the list is made anew."""
LONGEST_S = 40.0
"""Longer tests are extended, unless they are kept. At the end of a session, the other workers wait for such tests."""
_SHORT_S = 1.0
"""Shorter tests always belong to `make test`."""
_KEPT_FILES = frozenset(
    {
        "baseline/test_continue.py",
        "incremental/test_model.py",
        "ingest/histories/test_real_history.py",
        "lossy/test_lossy.py",
        "simulation/test_simulation.py",
        "test_one_daemon.py",
        "ui/test_ui.py",
    }
)
"""Files whose tests all belong to `make test`. Most of their work is done in other processes, where coverage is not measured."""
_KEPT_NAMES = ("planted_bug", "test_it_finds_the_bug")
"""Parts of the names of tests that all belong to `make test`: they show that a defect is found."""
_LIST = Path(__file__).with_name("extended.txt")

Reached = Mapping[str, npt.NDArray[np.int64]]
"""Test -> numbers of the branches and lines of the package that it reaches."""


def read_list() -> frozenset[str]:
    """Return the names of the extended tests, relative to the tests' folder."""
    return frozenset(_LIST.read_text().splitlines())


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the extended tests among the collected ones."""
    extended = read_list()
    for item in items:
        if item.nodeid.removeprefix(FOLDER) in extended:
            item.add_marker(MARKER)


def choose_extended(
    seconds: Mapping[str, float],
    reached: Reached,
    *,
    kept: Collection[str] = (),
    budget_s: float = BUDGET_S,
    longest_s: float = LONGEST_S,
) -> set[str]:
    """Return the tests that `make test` leaves out.

    Short tests remain, of each file the shortest test, and tests that reach nothing: they check the code in other
    ways than by running it. Then those remain that reach the most for their time that no other remaining test
    reaches, within the budget.

    Args:
        seconds: The seconds of each test.
        reached: What each test reaches. Tests that reach nothing are missing.
        kept: Tests that remain in any case.
        budget_s: The sum of the times of the tests that remain.
        longest_s: The longest time of a test that remains, unless it is kept.
    """
    shortest: dict[str, str] = {}
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        shortest.setdefault(split(test)[0], test)
    remaining = {test for test, took in seconds.items() if took < _SHORT_S}
    remaining |= {*shortest.values()} | (seconds.keys() - reached.keys())
    too_long = {test for test, took in seconds.items() if took > longest_s}
    remaining = remaining - too_long | {*kept} & seconds.keys()
    found = _reached_by(remaining, reached)

    def gain(test: str) -> float:
        return int(np.count_nonzero(~found[reached[test]])) / seconds[test]

    left_s = budget_s - sum(seconds[test] for test in remaining)
    # What a test adds only shrinks, so the first test is the best one if its gain is still what it was.
    queue = [(-gain(test), test) for test in seconds.keys() - remaining - too_long if test in reached]
    heapq.heapify(queue)
    while queue:
        known, test = heapq.heappop(queue)
        now = gain(test)
        if now < -known:
            heapq.heappush(queue, (-now, test))
        elif now and seconds[test] <= left_s:
            remaining.add(test)
            found[reached[test]] = True
            left_s -= seconds[test]
    return seconds.keys() - remaining


def _reached_by(tests: Iterable[str], reached: Reached) -> npt.NDArray[np.bool_]:
    """Return for each number whether one of the tests reaches it."""
    found = np.zeros(1 + max((int(one.max()) for one in reached.values() if len(one)), default=0), dtype=bool)
    for test in tests:
        if test in reached:
            found[reached[test]] = True
    return found


def read_reached(files: Iterable[Path]) -> Reached:
    """Return what each test reaches, from data of coverage.py with `--cov-branch --cov-context=test`."""
    numbers: dict[tuple[str, int, int], int] = {}
    by_test: dict[str, list[int]] = defaultdict(list)
    for file in files:
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
            contexts = dict(database.execute("SELECT id, context FROM context"))
            paths = dict(database.execute("SELECT id, path FROM file"))
            for path, context, start, end in database.execute(
                "SELECT file_id, context_id, fromno, tono FROM arc"
            ):
                test = contexts[context].rpartition("|")[0].partition("::")
                if test[2]:
                    number = numbers.setdefault((paths[path], start, end), len(numbers))
                    by_test["".join(test).removeprefix(FOLDER)].append(number)
    return {test: np.unique(np.array(found, dtype=np.int64)) for test, found in by_test.items()}


def main(arguments: Sequence[str]) -> int:
    """Choose the extended tests by a report of `pytest --junitxml` and by data of coverage.py, and write the list."""
    report, *coverage = map(Path, arguments)
    seconds = {nodeid.removeprefix(FOLDER): took for nodeid, took in seconds_of(report).items()}
    kept = [
        test for test in seconds if split(test)[0] in _KEPT_FILES or any(name in test for name in _KEPT_NAMES)
    ]
    reached = read_reached(coverage)
    chosen = choose_extended(seconds, reached, kept=kept)
    _LIST.write_text("".join(f"{test}\n" for test in sorted(chosen)))
    rest = seconds.keys() - chosen
    share = _reached_by(rest, reached).sum() / _reached_by(reached, reached).sum()
    sys.stdout.write(
        f"{len(chosen)} of {len(seconds)} tests are extended. The others take {sum(seconds[test] for test in rest):.0f} s,"
        f" and reach {share:.1%} of what all tests reach.\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
