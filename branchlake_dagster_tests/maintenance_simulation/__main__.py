"""`python -m branchlake_dagster_tests.maintenance_simulation SEED [COUNT]`: play schedules, report failures.

The last line is JSON: how many failed, and how often each thing happened.
"""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import gc
import json
import sys
from collections import Counter

from branchlake_dagster_tests.maintenance_simulation.play import play


def main(first: int, count: int = 1) -> int:
    """Play `count` schedules from the seed `first`; return the number of those that failed."""
    failed, seen = 0, Counter[str]()
    gc.freeze()  # Dagster alone is half a million objects to look through, again and again
    for seed in range(first, first + count):
        played = play(seed)
        seen += played.seen
        if played.failure:
            failed += 1
            print(played.failure, end="\n\n", flush=True)
    print(
        json.dumps({"first": first, "schedules": count, "failed": failed, "seen": dict(sorted(seen.items()))})
    )
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:3])), 1))
