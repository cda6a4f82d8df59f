"""`python -m branchlake_dagster_tests.ingest.histories SEED [COUNT] [--actions 12] [--million]`.

Plays histories with kills of processes and servers on a stack of its own, and tells what failed. With
`--million` one topic of a million records with 1 % poison is ingested instead. The last line is JSON.
"""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from branchlake_dagster_tests.ingest.histories.million import million
from branchlake_dagster_tests.ingest.histories.real import ALL, RealHistory, stack


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """0: everything is as it should be; otherwise the folder with the logs is kept."""
    parser = argparse.ArgumentParser(prog="python -m branchlake_dagster_tests.ingest.histories")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--actions", type=int, default=12, help="of each history")
    parser.add_argument("--only", action="append", choices=ALL, help="these actions, in this sequence")
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--records", type=int, default=1_000_000, help="of --million")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="branchlake-histories-"))
    failed, seen = 0, Counter[str]()
    told: dict[str, object] = {}
    with stack(folder) as (lake, kafka, environment):
        if asked.million:
            told = million(lake, kafka, asked.seed, asked.records, say)
            failed = 0 if told["exact"] else 1
        else:
            for seed in range(asked.seed, asked.seed + asked.count):
                say(f"seed {seed}")
                random = Random(seed)
                actions = [*random.sample(ALL, k=min(len(ALL), asked.actions))]
                actions += random.choices(ALL, k=asked.actions - len(actions))
                played = RealHistory(lake, kafka, environment, seed, say=say).play(asked.only or actions)
                seen += played.seen
                failed += bool(played.problems)
                print(played, flush=True)
            told = {"first": asked.seed, "histories": asked.count, "failed": failed, "seen": dict(seen)}
    print(json.dumps(told))
    if failed:
        say(f"state and logs are kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
