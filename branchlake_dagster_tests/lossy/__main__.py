"""`python -m branchlake_dagster_tests.lossy SEED [--runs 200] [--rate 0.05]`: runs behind a lossy network.

An embedded Nessie, a proxy that loses and delays requests, and a real `dagster dev` whose run workers, sensors
and reaper all go through it. Afterwards every row is accounted for. Exit code 0: all is as it should be.
"""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.lossy.daemon import NotInTime, daemon
from branchlake_dagster_tests.lossy.faults import Dice
from branchlake_dagster_tests.lossy.plan import plan
from branchlake_dagster_tests.lossy.proxy import lossy_proxy
from branchlake_dagster_tests.lossy.report import faults_table, reasons, runs_table
from branchlake_dagster_tests.lossy.truth import World


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextmanager
def embedded(state: Path) -> Iterator[Lakehouse]:
    """A Nessie of its own behind a token, without Spark; stopped on leaving."""
    lake = Lakehouse(Settings(state_dir=state, session_kind="classic", guard_nessie=True, nessie_uri=None))
    try:
        ensure_main_has_commit(lake.nessie)
        yield lake
    finally:
        lake.servers.stop_all()


def play(state: Path, seed: int, *, runs: int, rate: float, at_once: int) -> list[str]:
    """Do it all in the folder `state`, print the tables; what is wrong, in sentences."""
    began = time.monotonic()
    dice = Dice(seed, rate)
    with embedded(state) as lake, lossy_proxy(lake.endpoints(spark=False).nessie_uri, dice) as proxy:
        environment = {
            "BRANCHLAKE_STATE_DIR": str(state),
            "BRANCHLAKE_SESSION_KIND": "classic",
            "BRANCHLAKE_NESSIE_URI": proxy.uri,
            "BRANCHLAKE_NESSIE_TOKEN": lake.endpoints(spark=False).nessie_token or "",
            "BRANCHLAKE_REAP_INTERVAL_MIN": "3",
            "BRANCHLAKE_DISCARD_GRACE_H": "0.000001",
        }
        with daemon(state / "dagster", environment, at_once=at_once) as dagster:
            say(f"the daemon runs after {time.monotonic() - began:.0f} s; the network is lossy from now on")
            problems: list[str] = []
            try:
                dagster.work_through(
                    list(plan(seed, runs)),
                    at_once=at_once,
                    say=say,
                    told=lambda: f"{dice.requests} requests, {dice.counts.total()} spoilt",
                )
                proxy.heal()
                dagster.settle(lake.nessie, say)
            except NotInTime as error:
                problems.append(f"{error}.")
            found = dagster.runs()
            problems += World.now(lake, dagster.instance, found).problems()
            if len(found) != runs:
                problems.append(f"{len(found)} runs are known, {runs} were to be launched")
            why = list(reasons(dagster.instance, found))
        print(f"seed {seed}, rate {rate}, {time.monotonic() - began:.0f} s", *runs_table(found), sep="\n")
        print(*faults_table(dice), "not published, and why:", *why, sep="\n")
    return problems


def main() -> int:
    """0: everything is as it should be, 1: it is not, and the folder with the logs is kept."""
    parser = argparse.ArgumentParser(prog="python -m branchlake_dagster_tests.lossy", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--rate", type=float, default=0.05, help="share of requests that something happens to"
    )
    parser.add_argument("--at-once", type=int, default=4, help="runs at the same time")
    asked = parser.parse_args()
    # So that an end from outside passes through all the `finally`s too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith("BRANCHLAKE_")]:
        del os.environ[name]  # what somebody has set for a lake of their own
    state = Path(tempfile.mkdtemp(prefix="branchlake-lossy-"))
    kept = False
    try:
        problems = play(state, asked.seed, runs=asked.runs, rate=asked.rate, at_once=asked.at_once)
        kept = bool(problems)
    except Exception:
        kept = True
        raise
    except KeyboardInterrupt:
        say("ended")
        return 130
    finally:
        if kept:
            say(f"its state and logs are kept in {state}")
        else:
            shutil.rmtree(state, ignore_errors=True)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"seed {asked.seed}: {len(problems)} problems" if problems else f"seed {asked.seed}: all is well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
