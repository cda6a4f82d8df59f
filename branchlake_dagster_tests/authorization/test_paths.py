"""Behind a Nessie that wants a token, every path works with it: not one request goes without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.cli import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.runs.discarding import discarded_tag_name
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import ReconstructableRepository
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.runtime import publish_at_end_project
from branchlake_dagster_tests.publication.runtime.publish_at_end_project import TOKEN_VARIABLE
from branchlake_dagster_tests.runs.test_retry import Flaky, retry
from branchlake_dagster_tests.suite.instances import new_instance

from .assets import appending, checked, serializable, sparked
from .conftest import Bearer
from .guard import TOKEN, Guard


@pytest.fixture
def lake(bearer: Bearer, guard: Guard) -> Iterator[Lakehouse]:
    """The lake with the right token; afterwards, that every request carried it."""
    yield bearer(TOKEN)
    assert guard.asked
    bare = [one for one in guard.asked if one.header != f"Bearer {TOKEN}"]
    # Spark's Nessie client asks for the API version before it thinks of its token, and shrugs at a refusal.
    assert all((one.method, one.path) == ("GET", "/api/v2/config") for one in bare), bare
    refused = [one for one in guard.asked if one.status in (401, 403) and one not in bare]
    assert refused == []


def outcomes(p: Project, *run_ids: str) -> dict[str, Outcome]:
    """What a pass over all branches does about these runs."""
    return {one.run_id: one for one in p.reconciler().reconcile_branches() if one.run_id in run_ids}


def test_run_check_and_merge(lake: Lakehouse, namespace: str) -> None:
    with project(lake, *checked(namespace)) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert p.rows(namespace, "checked") == [{"n": 1}]
        assert run_branch_name(run_id) not in p.branches()


def test_a_blocked_run_is_discarded(lake: Lakehouse, namespace: str) -> None:
    with project(lake, *checked(namespace, passes=False)) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.BLOCKED
        assert discarded_tag_name(run_branch_name(run_id)) in p.branches()


def test_two_runs_of_one_table_are_rebased(lake: Lakehouse, namespace: str) -> None:
    with project(lake, appending(namespace)) as p:
        p.settle(p.run())
        first, second = p.run(), p.run()
        assert p.settle(first).state is RunState.PUBLISHED
        rebased = p.settle(second)
        assert rebased.state is RunState.PUBLISHED
        assert "rebased" in rebased.detail
        assert len(p.rows(namespace, "t")) == 3


def test_runs_that_wait_together_share_a_commit(lake: Lakehouse, namespace: str) -> None:
    with project(lake, appending(namespace)) as p:
        p.settle(p.run())
        runs = [p.run() for _ in range(3)]
        found = outcomes(p, *runs)
        assert {one.state for one in found.values()} == {RunState.PUBLISHED}
        assert len({one.publication for one in found.values()}) == 1
        assert len(p.rows(namespace, "t")) == 4


def test_serializable_runs(lake: Lakehouse, namespace: str) -> None:
    source = appending(namespace)
    summed = serializable(namespace, source)
    with project(lake, source, summed) as p:
        p.settle(p.run(source.key))
        passes = p.run(summed.key)
        assert p.settle(passes).state is RunState.PUBLISHED
        fails = p.run(summed.key)
        p.settle(p.run(source.key))
        assert p.settle(fails).state is RunState.REFUSED


def test_publishing_inside_the_run(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, str(next(publish_at_end_project.tokens)))
    repository = ReconstructableRepository.for_module(publish_at_end_project.__name__, "defs")
    job = repository.get_reconstructable_job("publishing_job")
    with new_instance() as instance, dg.execute_job(job, instance=instance) as result:
        run = instance.get_run_by_id(result.run_id)
        assert run is not None
        assert run.tags[RunTag.PUBLICATION]


def test_retry_reap_and_sweep(lake: Lakehouse, namespace: str) -> None:
    flaky = Flaky(namespace)
    with project(lake, *flaky.assets) as p:
        parent = p.run(ok=False)
        second = retry(p, parent, ok=False)
        reaped = {one.branch: one for one in reap_branches(lake, p.instance)}
        assert reaped[run_branch_name(second)].deletes_branch
        flaky.broken = False
        third = retry(p, second)
        assert p.settle(third).state is RunState.PUBLISHED
        assert p.rows(namespace, "second") == [{"n": 1, "twice": 2}]

        flaky.broken = True
        failed = p.run(ok=False)
        p.settle(failed)
        tag = discarded_tag_name(run_branch_name(failed))
        later = datetime.now(UTC) + timedelta(hours=25)
        swept = {one.run_id: one for one in sweep_discarded(lake, p.instance, now=lambda: later)}
        assert swept[failed].done, swept[failed]
        assert swept[failed].files > 0
        assert p.branches().isdisjoint({tag, f"sweeping-{failed}"})


def test_the_commands(lake: Lakehouse) -> None:
    status = CliRunner().invoke(main, ["status", "--json"])
    assert status.exit_code == 0, status.output
    assert json.loads(status.stdout)["main"] == lake.nessie.reference("main").hash
    reap = CliRunner().invoke(main, ["reap", "--dry-run"])
    assert reap.exit_code == 0, reap.output


def test_pyicebergs_own_entrance(lake: Lakehouse, guard: Guard, namespace: str) -> None:
    catalog = load_catalog(
        "nessie",
        **{
            "py-catalog-impl": "branchlake_dagster.catalog.NessieCatalog",
            "uri": guard.uri,
            "token": TOKEN,
            "warehouse": lake.settings.warehouse_uri,
        },
    )
    assert (namespace,) not in catalog.list_namespaces()
    catalog.create_namespace(namespace)
    assert (namespace,) in catalog.list_namespaces()
    catalog.drop_namespace(namespace)


@pytest.mark.spark
def test_spark_reads_writes_and_checks(lake: Lakehouse, namespace: str) -> None:
    source = appending(namespace)
    with project(lake, source, *sparked(namespace, source)) as p:
        run_id = p.run()
        assert p.settle(run_id).state is RunState.PUBLISHED
        assert p.rows(namespace, "sparked") == [{"n": 1}, {"n": 1}]
