"""`python -m branchlake_dagster_tests.incremental SEED [COUNT]`: play histories and tell what failed.

The last line is JSON: how many failed, and how often each thing happened.
"""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import gc
import json
import sys
from collections import Counter

from branchlake_dagster_tests.incremental.play import play
from branchlake_dagster_tests.incremental.window_cache import cache_windows


def main(first: int, count: int = 1) -> int:
    """Play `count` histories from the seed `first`; the number of those that failed."""
    failed, seen = 0, Counter[str]()
    cache_windows()
    gc.freeze()  # Dagster alone is half a million objects to look through, again and again
    for seed in range(first, first + count):
        played = play(seed)
        seen += played.seen
        if played.failure:
            failed += 1
            print(played.failure, end="\n\n")
    print(
        json.dumps({"first": first, "histories": count, "failed": failed, "seen": dict(sorted(seen.items()))})
    )
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:3])), 1))
