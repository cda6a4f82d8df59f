"""`kill -9` of writers, publisher and Nessie at random moments; afterwards every row is accounted for.

`BRANCHLAKE_TEST_KILLS` says how many kills (4: the publisher, Nessie and two writers), `BRANCHLAKE_TEST_KILL_SEED`
sets the choice of victims and delays (0).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.servers import NESSIE
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Publication, iter_publications
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.discarding import FAILING_STATUSES
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.cleanup import kill_project as project
from branchlake_dagster_tests.cleanup.kill_crew import Crew
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS

KILLS = int(os.environ.get("BRANCHLAKE_TEST_KILLS", "4"))
SEED = int(os.environ.get("BRANCHLAKE_TEST_KILL_SEED", "0"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 30 * KILLS)]

# Captured logs need processes beside each step, which would outlive a killed one.
CONFIGURATION = f"""
telemetry: {{enabled: false}}
{COMPUTE_LOGS}
"""
ROLES = {
    "appender": "appender",
    "self-publishing": "publishing",
    "replacer": "replacer",
    "publisher": "publisher",
}
WRITERS = [name for name in ROLES if name != "publisher"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A state folder and a Dagster home of the test's own, for this process and the crew."""
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(CONFIGURATION)
    found = {
        "BRANCHLAKE_STATE_DIR": str(tmp_path / "state"),
        "BRANCHLAKE_SESSION_KIND": "classic",
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
        "BRANCHLAKE_DISCARD_GRACE_H": "0.000001",
        "DAGSTER_HOME": str(home),
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with dg.DagsterInstance.get():
        pass  # it makes its databases, and cannot do so in several processes at once
    # For the crew's process, which imports this package by name.
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return found


@pytest.fixture
def lake(environment: dict[str, str]) -> Iterator[Lakehouse]:
    found = Lakehouse()
    ensure_main_has_commit(found.nessie)
    yield found
    found.servers.stop_all()


def kill_nessie(lake: Lakehouse, chance: random.Random) -> bool:
    """Kill the server, and wait until a worker has started it again."""
    record = lake.servers.status()[NESSIE]
    assert record is not None
    time.sleep(chance.uniform(0, 1))
    os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while (now := lake.servers.status()[NESSIE]) is None or now == record:
        process._reap_child(record.pid)
        assert time.monotonic() < deadline, "nobody has started Nessie again"
        time.sleep(0.05)
    return True


def strikes(lake: Lakehouse, crew: Crew, chance: random.Random) -> Counter[str]:
    """KILLS kills in a random order; how many of each kind met their victim at work."""
    publisher, nessie = max(1, KILLS // 3), max(1, KILLS // 8)
    victims = (
        ["publisher"] * publisher + ["Nessie"] * nessie + ["writer"] * max(1, KILLS - publisher - nessie)
    )
    chance.shuffle(victims)
    met: Counter[str] = Counter()
    for victim in victims:
        if victim == "Nessie":
            met[victim] += kill_nessie(lake, chance)
            continue
        name = chance.choice(WRITERS) if victim == "writer" else victim
        if victim == "publisher" or chance.random() < 0.5:
            # So that there is something to publish, and something to lose.
            crew.work_done(*WRITERS)
        met[victim] += crew.workers[name].strike(chance, from_the_start=victim == "publisher")
    return met


def settle(lake: Lakehouse, instance: dg.DagsterInstance) -> int:
    """What the daemon does about it: reap the dead, publish the passed, delete what nobody needs.

    How many runs had to be ended by hand, as in the UI: they were killed when they did not beat, before their
    first heartbeat or after their last, and Dagster takes them for running.
    """
    by_hand = 0
    graph = project.appender.get_repository_def().asset_graph
    later = datetime.now(UTC) + timedelta(hours=7)
    for _ in range(10):
        # Seven hours later: some were killed between the making of their branch and their first heartbeat.
        list(reap_branches(lake, instance, now=lambda: later))
        outcomes = list(Reconciler.from_lake(lake, instance, graph).reconcile_branches())
        list(sweep_discarded(lake, instance))
        if not outcomes and {ref.name for ref in lake.nessie.references()} == {MAIN}:
            return by_hand
        for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            instance.report_run_failed(run, "Ended by hand.")
            by_hand += 1
    left = [str(one) for one in outcomes], sorted(ref.name for ref in lake.nessie.references())
    raise AssertionError(f"not quiet after ten passes: {left}")


def tokens(lake: Lakehouse, table: str) -> Counter[tuple[str, str, int]]:
    found = lake.catalog().load_table((project.NAMESPACE, table)).scan().to_arrow().to_pylist()
    return Counter((row["part"], row["token"], row["n"]) for row in found)


def expected(
    runs: list[dg.DagsterRun], ledger: list[Publication]
) -> tuple[Counter[tuple[str, str, int]], ...]:
    """The rows of `shared` and `beside`: those of every published run, but for what later ones replaced."""
    parts = {run.run_id: run.tags["dagster/partition"] for run in runs}
    shared: dict[str, list[str]] = {}
    for one in ledger:
        part = parts[one.run_id]
        shared[part] = [*shared.get(part, []), one.run_id] if part == project.APPENDED else [one.run_id]
    numbers = range(project.ROWS)
    rows = Counter((part, run, n) for part, ids in shared.items() for run in ids for n in numbers)
    return rows, Counter((part, run, n) for part, run, n in rows.elements() if part == project.APPENDED)


def test_every_published_row_exists_once_and_no_other(
    lake: Lakehouse, environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"BRANCHLAKE_TEST_KILL_SEED={SEED}")  # noqa: T201 - shown when it fails, wherever that is
    chance = random.Random(SEED)
    began = time.monotonic()
    with Crew(environment, tmp_path, ROLES) as crew:
        met = strikes(lake, crew, chance)
        for name in WRITERS:  # so that each of them has runs that pass
            crew.workers[name].wait(lambda board=crew.workers[name].board: board.done.value >= 2)
        crew.finish()
    struck = time.monotonic()
    with dg.DagsterInstance.get() as instance:
        by_hand = settle(lake, instance)
        runs = list(instance.get_runs())
    ledger = list(iter_publications(lake.nessie))[::-1]
    with capsys.disabled():
        ended = Counter(f"{run.tags['kill/role']} {run.status.value.lower()}" for run in runs)
        print(  # noqa: T201 - what was hit is part of the result
            f"\n{KILLS} kills, BRANCHLAKE_TEST_KILL_SEED={SEED}; met at work: {dict(met)}; {len(ledger)} of {len(runs)} runs "
            f"published; {by_hand} ended by hand; {dict(sorted(ended.items()))}; {struck - began:.0f} s + {time.monotonic() - struck:.0f} s"
        )

    assert max(Counter(one.run_id for one in ledger).values()) == 1
    assert tuple(tokens(lake, name) for name in ("shared", "beside")) == expected(runs, ledger)

    published = {one.run_id: one.hash for one in ledger}
    for run in runs:
        assert run.tags.get(RunTag.PUBLICATION) == published.get(run.run_id), run.tags
        status = run.tags.get(RunTag.STATUS)
        assert status not in FAILING_STATUSES or not run.is_success, run.tags
        good = (run.is_success or status == RunState.REFUSED) and project.SPOILT not in run.tags
        if run.run_id in published:
            assert good or run.tags["kill/role"] == "publishing"
        else:
            # Appends never stand in each other's way.
            assert not good or run.tags["kill/role"] == "replacer", run.tags
            assert run.tags.get(RunTag.VERDICT) != "passed" or run.tags["kill/role"] == "replacer"
    assert all(met.values()), met
    roles = {run.tags["kill/role"] for run in runs if run.run_id in published}
    assert roles == {ROLES[name] for name in WRITERS}
