"""After good runs, bad runs and refused ones, the token is nowhere but where it is needed."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import time
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.cli import main
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster_tests.harness import project

from . import leaks
from .assets import FREE, checked, sparked
from .conftest import Bearer
from .guard import EXPIRED, READ_ONLY, TOKEN, Guard, forms

SECRETS = (TOKEN, READ_ONLY, EXPIRED)


def test_the_search_finds_existing_names(tmp_path: Path) -> None:
    for number, form in enumerate(forms(TOKEN)):
        tmp_path.joinpath(f"{number}.log").write_bytes(b"\x00 Bearer " + form.encode() + b"\xff")
    tmp_path.joinpath("clean.log").write_text("Bearer ***")
    assert [path.name for path in sorted(leaks.in_files(tmp_path, SECRETS))] == ["0.log", "1.log", "2.log"]
    assert leaks.in_command_lines(["pytest"])


class Scenery:
    """A run that does what can be done, and looks at its own heartbeat meanwhile."""

    def __init__(self, namespace: str, lake: Lakehouse, guard: Guard) -> None:
        self.heartbeats: list[str] = []
        folder = Path(lake.settings.warehouse_uri.removeprefix("file://")) / "_branchlake" / "heartbeats"

        @dg.asset(key=[namespace, "t"], metadata=FREE)
        def watched(spark: BranchSparkResource) -> pl.DataFrame:
            spark.spark_session.sql("SELECT 1").collect()
            until = time.monotonic() + 10
            while not self.heartbeats and time.monotonic() < until:
                self.heartbeats += [path.read_text() for path in folder.rglob("*.json")]
            sys.stdout.write("said on standard output\n")
            return pl.DataFrame({"n": [1]})

        @dg.asset(key=[namespace, "expiring"], deps=[watched], metadata=FREE)
        def expiring(spark: BranchSparkResource) -> DataFrame:
            frame = spark.spark_session.table(f"nessie.{namespace}.t")
            guard.full.clear()
            return frame

        self.watched, self.expiring = watched, expiring
        self.assets = (watched, expiring, *sparked(namespace, watched))


@pytest.mark.spark
def test_the_token_is_nowhere(
    bearer: Bearer,
    guard: Guard,
    lakehouse: Lakehouse,
    spark_session: SparkSession,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    since = lakehouse.nessie.reference(MAIN).hash
    lake = bearer(TOKEN)
    scenery = Scenery(namespace, lakehouse, guard)
    told: list[str] = []
    errors: list[BranchlakeError] = []
    with (
        dg.instance_for_test() as capturing,  # the output of steps is a place where the token must not be
        project(lake, *scenery.assets, instance=capturing) as p,
        project(lake, *checked(f"{namespace}b", passes=False)) as blocked,
    ):
        # -- good, blocked, and two whose token expires
        good = p.run(scenery.watched.key, dg.AssetKey([namespace, "sparked"]))
        told.append(str(p.settle(good)))
        assert RunState.PUBLISHED in told[-1]
        told.append(str(blocked.settle(blocked.run())))
        assert RunState.BLOCKED in told[-1]
        waiting = p.run(scenery.watched.key)
        failed = p.run(scenery.watched.key, scenery.expiring.key, ok=False)
        p.failed_with(NessieUnauthorized)
        guard.full.add(TOKEN)

        # -- refused
        for token in (EXPIRED, READ_ONLY):
            refused = bearer(token)
            p.run(scenery.watched.key, ok=False)
            p.failed_with(NessieUnauthorized)
            reconciler = Reconciler.from_lake(refused, p.instance, p.graph)
            for attempt in (
                lambda found=reconciler: told.append(str(found.reconcile_run(waiting))),
                lambda lake=refused: told.extend(map(str, reap_branches(lake, p.instance))),
                lambda lake=refused: told.append(str(lake.catalog().create_namespace(namespace + "x"))),
            ):
                try:
                    attempt()
                except BranchlakeError as error:
                    errors.append(error)
            for command in (["status", "--json"], ["reap", "--dry-run"]):
                told.append(CliRunner().invoke(main, command).output)
        assert len(errors) == 5

        # -- the end of it
        lake = bearer(TOKEN)
        told += map(str, reap_branches(lake, p.instance))
        told += map(str, sweep_discarded(lake, p.instance))
        told.append(CliRunner().invoke(main, ["status", "--json"]).output)
        assert json.loads(told[-1])["main"]
        told.append(p.settle(waiting).detail)

        # -- where it may be
        assert scenery.heartbeats
        logs = {path: path.read_text() for path in Path(p.instance.root_directory).rglob("*.out")}
        assert any("said on standard output" in text for text in logs.values())
        captured = capfd.readouterr()
        texts = {
            "answers": told,
            "errors": [form for error in errors for form in (str(error), repr(error), repr(vars(error)))],
            "pickled errors": [pickle.dumps(error).decode("latin-1") for error in errors],
            "heartbeats": scenery.heartbeats,
            "Python's log": [caplog.text],
            "standard output": [captured.out, captured.err],
            "Dagster": [*leaks.of_dagster(p.instance), *leaks.of_dagster(blocked.instance)],
            "Nessie": [*leaks.of_nessie(lakehouse, since)],
            "tables": [*leaks.of_tables(lakehouse, namespace)],
        }
        assert all(any(part) for part in texts.values())
        assert any(failed in text for text in texts["Dagster"])
        assert [
            place for place, parts in texts.items() if any(leaks.in_text(t, SECRETS) for t in parts)
        ] == []
        for instance in (p.instance, blocked.instance):
            assert leaks.in_files(Path(instance.root_directory), SECRETS) == []
    assert leaks.in_files(lakehouse.settings.state_dir, SECRETS) == []
    assert leaks.in_command_lines(SECRETS) == []
    # The secret that we make ourselves, for the embedded Spark server.
    secret = lakehouse.endpoints().spark_token
    assert secret
    (kept,) = leaks.in_files(lakehouse.settings.state_dir, [secret])
    assert leaks.is_private(kept)
    assert leaks.in_command_lines([secret]) == []
