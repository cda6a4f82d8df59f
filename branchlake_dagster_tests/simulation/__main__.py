"""`python -m branchlake_dagster_tests.simulation SEED [COUNT]`: play schedules and tell what failed."""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import sys

from branchlake_dagster_tests.simulation.invariants import failures


def main(first: int, count: int = 1) -> int:
    """Play `count` schedules from the seed `first`; the number of those that failed."""
    failed = 0
    for _, story in failures(range(first, first + count)):
        failed += 1
        print(story, end="\n\n")
    print(f"{failed} of {count} schedules from seed {first} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:3])), 1))
