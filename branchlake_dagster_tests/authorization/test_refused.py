"""Without a token, or with one that may only read, every path fails clearly and soon, and deletes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import dagster as dg
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.cli import main
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.run_publication import LEFT_TO_SENSOR, RunPublication
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import ReconstructableRepository
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.publication.runtime import publish_at_end_project
from branchlake_dagster_tests.publication.runtime.publish_at_end_project import TOKEN_VARIABLE
from branchlake_dagster_tests.runs.test_retry import Flaky, retry
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.raised import raising

from .assets import FREE, appending, checked, sparked
from .conftest import Bearer
from .guard import READ_ONLY, TOKEN, Guard

SOON_S = 50.0
"""Spark tries for a minute where a server may come back."""
HINT = "BRANCHLAKE_NESSIE_TOKEN"
References = dict[str, str]


def references(lake: Lakehouse) -> References:
    return {ref.name: ref.hash for ref in lake.nessie.references()}


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Nothing waits for a server that has said no."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


@pytest.fixture
def untouched(lakehouse: Lakehouse) -> Iterator[Callable[[], None]]:
    """Afterwards every reference is as it was when the test called this."""
    seen: list[References] = []
    yield lambda: seen.append(references(lakehouse))
    assert seen, "the test did not say when"
    assert references(lakehouse) == seen[-1]


def says_so(text: str) -> None:
    assert HINT in text
    assert "HTTP 401" in text or "HTTP 403" in text


either = pytest.mark.parametrize("token", [None, READ_ONLY], ids=["no token", "read-only"])


@either
def test_runs(
    token: str | None,
    bearer: Bearer,
    lakehouse: Lakehouse,
    namespace: str,
    untouched: Callable[[], None],
) -> None:
    source = appending(namespace)
    with project(bearer(token), source, *sparked(namespace, source)) as p:
        untouched()
        p.run(source.key, ok=False)
        p.failed_with(NessieUnauthorized, HINT, "HTTP")


@either
def test_a_run_does_not_fall_back_to_main(
    token: str | None,
    bearer: Bearer,
    monkeypatch: pytest.MonkeyPatch,
    namespace: str,
    untouched: Callable[[], None],
) -> None:
    monkeypatch.setenv("BRANCHLAKE_WHEN_UNAVAILABLE", "direct_main")
    with project(bearer(token), appending(namespace)) as p:
        untouched()
        p.run(ok=False)
        p.failed_with(NessieUnauthorized, HINT)


@either
def test_publishing_and_discarding(
    token: str | None, bearer: Bearer, lakehouse: Lakehouse, namespace: str, untouched: Callable[[], None]
) -> None:
    with (
        project(lakehouse, *checked(namespace)) as good,
        project(lakehouse, *checked(f"{namespace}b", passes=False)) as bad,
    ):
        runs = [(good, good.run()), (bad, bad.run())]
        untouched()
        refused = bearer(token)
        for p, run_id in runs:
            reconciler = Reconciler.from_lake(refused, p.instance, p.graph)
            if token is None:
                with pytest.raises(NessieUnauthorized) as caught:
                    list(reconciler.reconcile_branches())
                says_so(str(caught.value))
            else:
                (outcome,) = [one for one in reconciler.reconcile_branches() if one.run_id == run_id]
                assert outcome.state is RunState.TRY_AGAIN
                says_so(outcome.detail)
        undone = {p.instance.get_run_by_id(run_id).tags.get(RunTag.VERDICT) for p, run_id in runs}
        assert undone == {"pending"}


def test_what_was_refused_is_published_with_the_right_token(
    bearer: Bearer, lakehouse: Lakehouse, namespace: str
) -> None:
    with project(lakehouse, *checked(namespace)) as p:
        run_id = p.run()
        for token, action in ((READ_ONLY, RunState.TRY_AGAIN), (TOKEN, RunState.PUBLISHED)):
            outcome = Reconciler.from_lake(bearer(token), p.instance, p.graph).reconcile_run(run_id)
            assert outcome is not None
            assert outcome.state is action


def test_a_run_whose_token_expires_before_it_publishes_itself(
    bearer: Bearer, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bearer(TOKEN)
    monkeypatch.setenv(TOKEN_VARIABLE, str(next(publish_at_end_project.tokens)))
    publish = RunPublication.publish

    def late(self: RunPublication, run: dg.DagsterRun) -> object:
        guard.full.clear()
        return publish(self, run)

    monkeypatch.setattr(RunPublication, "publish", late)
    repository = ReconstructableRepository.for_module(publish_at_end_project.__name__, "defs")
    job = repository.get_reconstructable_job("publishing_job")
    with new_instance() as instance, dg.execute_job(job, instance=instance) as result:
        (told,) = [e.message for e in result.all_events if LEFT_TO_SENSOR in (e.message or "")]
        says_so(told)
        guard.full.add(TOKEN)
        graph = publish_at_end_project.defs.get_repository_def().asset_graph
        outcome = Reconciler.from_lake(bearer(TOKEN), instance, graph).reconcile_run(result.run_id)
        assert outcome is not None
        assert outcome.state is RunState.PUBLISHED


@either
def test_reaping_and_sweeping(
    token: str | None, bearer: Bearer, lakehouse: Lakehouse, namespace: str, untouched: Callable[[], None]
) -> None:
    flaky, at_once = Flaky(namespace), {"discard_grace_h": 1e-6}
    # The runs record the grace: what sweeps them follows it.
    with project(Lakehouse(lakehouse.settings.model_copy(update=at_once)), *flaky.assets) as p:
        p.settle(p.run(ok=False))  # something to sweep
        waits = p.run(ok=False)  # and to reap
        untouched()
        refused = bearer(token)
        eager = Lakehouse(refused.settings.model_copy(update=at_once))
        for attempt in (reap_branches, sweep_discarded):
            with pytest.raises(NessieUnauthorized) as caught:
                list(attempt(eager, p.instance))
            says_so(str(caught.value))
        assert run_branch_name(waits) in references(lakehouse)


@either
def test_retrying(
    token: str | None,
    bearer: Bearer,
    lakehouse: Lakehouse,
    monkeypatch: pytest.MonkeyPatch,
    namespace: str,
    untouched: Callable[[], None],
) -> None:
    flaky = Flaky(namespace)
    with project(lakehouse, *flaky.assets) as p, project(bearer(token), *flaky.assets) as again:
        monkeypatch.delenv("BRANCHLAKE_NESSIE_URI")
        parent = p.run(ok=False)
        flaky.broken = False
        untouched()
        bearer(token)
        again.instance = p.instance
        retry(again, parent, ok=False)
        (failure,) = [event for event in again.last.all_events if event.is_run_failure]
        assert "NessieUnauthorized" in str(failure.event_specific_data)
        assert HINT in str(failure.event_specific_data)


@either
def test_the_commands(token: str | None, bearer: Bearer, untouched: Callable[[], None]) -> None:
    bearer(token)
    untouched()
    for command in (["status", "--json"], ["reap", "--dry-run"]):
        done = CliRunner().invoke(main, command)
        if token is None:
            assert done.exit_code == 1
            assert len(done.output.splitlines()) == 1
            says_so(done.output)
        else:
            assert done.exit_code == 0, done.output


@either
def test_pyicebergs_own_entrance(
    token: str | None, bearer: Bearer, guard: Guard, namespace: str, untouched: Callable[[], None]
) -> None:
    bearer(token)
    untouched()
    properties = {
        "py-catalog-impl": "branchlake_dagster.catalog.NessieCatalog",
        "uri": guard.uri,
        **({"token": token} if token else {}),
    }
    catalog = load_catalog("nessie", **properties)
    if token is None:
        with pytest.raises(NessieUnauthorized):
            catalog.list_namespaces()
    else:
        catalog.list_namespaces()
    with pytest.raises(NessieUnauthorized) as caught:
        catalog.create_namespace(namespace)
    says_so(str(caught.value))


@pytest.mark.spark
def test_a_spark_session(spark_session: SparkSession, bearer: Bearer, untouched: Callable[[], None]) -> None:
    untouched()
    session = bearer(None).spark_session(MAIN)
    try:
        with raising(NessieUnauthorized, HINT):
            session.sql("SHOW NAMESPACES IN nessie").collect()
    finally:
        session.stop()


@pytest.mark.spark
def test_a_token_that_expires_under_spark(
    spark_session: SparkSession, bearer: Bearer, guard: Guard, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def expiring(spark: BranchSparkResource) -> DataFrame:
        session = spark.spark_session
        session.sql(f"CREATE NAMESPACE nessie.{namespace}")
        session.sql(f"CREATE TABLE nessie.{namespace}.source AS SELECT 1L AS n")
        frame = session.table(f"nessie.{namespace}.source")
        guard.full.clear()
        return frame

    with project(bearer(TOKEN), expiring) as p:
        run_id = p.run(ok=False)
        p.failed_with(NessieUnauthorized, HINT)
        guard.full.add(TOKEN)
        assert run_branch_name(run_id) in p.branches()
        assert p.settle(run_id).state is RunState.DISCARDED
