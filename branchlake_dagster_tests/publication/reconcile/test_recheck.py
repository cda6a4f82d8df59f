"""Checks on whole tables are made again on the rebased state, by a Dagster run that the sensor asks for."""

import time

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.recheck import publication_branch_name
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import AssetMetadata, RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def appending(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"], metadata=table_metadata(write_mode="append"), config_schema={"n": dg.Field(int)}
    )
    def appended(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"n": [context.op_execution_context.op_config["n"]]})

    return appended


def at_most(asset: dg.AssetsDefinition, most: int, scope: str | None = "table") -> dg.AssetChecksDefinition:
    """A check that only the whole table can answer."""

    @dg.asset_check(asset=asset, metadata={AssetMetadata.CHECK_SCOPE: scope} if scope else None)
    def total(appended: pl.DataFrame) -> dg.AssetCheckResult:
        found = int(appended["n"].sum())
        return dg.AssetCheckResult(passed=found <= most, description=f"sum is {found}, at most {most}")

    return total


def run(p: Project, namespace: str, n: int) -> str:
    return p.run(run_config={"ops": {f"{namespace}__t": {"config": {"n": n}}}})


def check_run(p: Project, outcome: Outcome) -> str:
    """Launch what the sensor asks for, as the daemon would."""
    assert outcome.check_run is not None
    request = outcome.check_run.to_run_request()
    job = p.definitions.resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection=set(request.asset_check_keys or []))
    result = subset.execute_in_process(instance=p.instance, tags=dict(request.tags), raise_on_error=False)
    return result.run_id


def rows(p: Project, namespace: str) -> list[int]:
    return sorted(row["n"] for row in p.rows(namespace, "t"))


def test_a_rebased_table_is_checked_again_before_it_is_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        assert p.settle(first).state is RunState.PUBLISHED
        asked = p.settle(second)
        assert asked.state is RunState.CHECKING
        assert f"total on {namespace}/t" in asked.detail
        assert rows(p, namespace) == [1, 2]
        assert publication_branch_name(second) in p.branches()
        assert p.settle(second).check_run == asked.check_run  # asked again until it runs
        checks = check_run(p, asked)
        done = p.settle(second)
        assert done.state is RunState.PUBLISHED, done
        assert rows(p, namespace) == [1, 2, 3]
        assert {publication_branch_name(second), run_branch_name(second), run_branch_name(checks)}.isdisjoint(
            p.branches()
        )


def test_a_rebased_table_that_fails_its_check_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    """Each run passed alone; together they break what the check promises."""
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 6), run(p, namespace, 7)
        p.settle(first)
        checks = check_run(p, p.settle(second))
        refused = p.settle(second)
        assert refused.state is RunState.REFUSED
        assert refused.codes == ("checks_failed",)
        names = (checks, f"total on {namespace}/t", "sum is 14, at most 10")
        assert [name for name in names if name not in refused.detail] == []
        assert rows(p, namespace) == [1, 6]
        assert {publication_branch_name(second), run_branch_name(second)}.isdisjoint(p.branches())


def test_main_moves_again_while_the_checks_run(lakehouse: Lakehouse, namespace: str) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 100)) as p:
        p.settle(run(p, namespace, 1))
        first, second, third = (run(p, namespace, n) for n in (2, 3, 4))
        p.settle(first)
        asked = p.settle(second)
        # A third one waits: otherwise a busy table would move away under every check.
        outcomes = {o.run_id: o for o in p.reconciler().reconcile_branches()}
        assert outcomes[third].state is RunState.WAITING
        assert second in outcomes[third].detail
        # Somebody else changes the table all the same.
        lakehouse.catalog().load_table((namespace, "t")).append(
            pl.DataFrame({"n": [50]})
            .to_arrow()
            .cast(lakehouse.catalog().load_table((namespace, "t")).schema().as_arrow())
        )
        check_run(p, asked)
        again = p.settle(second)
        assert again.state is RunState.CHECKING
        assert again.check_run is not None
        assert again.check_run != asked.check_run
        check_run(p, again)
        assert p.settle(second).state is RunState.PUBLISHED
        check_run(p, p.settle(third))
        assert p.settle(third).state is RunState.PUBLISHED
        assert rows(p, namespace) == [1, 2, 3, 4, 50]


def test_a_check_run_that_dies_is_asked_for_again_and_then_refused(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        p.settle(first)
        keys = []
        with monkeypatch.context() as patch:
            patch.setattr(LakehouseResource, "own_catalog", lambda _: 1 / 0)
            for _ in range(3):
                asked = p.settle(second)
                assert asked.check_run is not None
                keys.append(asked.check_run.key)
                check_run(p, asked)
        assert len(set(keys)) == 3
        refused = p.settle(second)
        assert refused.state is RunState.REFUSED
        assert refused.codes == ("checks_gave_no_verdict",)


@pytest.mark.parametrize(("scope", "action"), [("rows", RunState.PUBLISHED), (None, RunState.CHECKING)])
def test_the_scope_decides_and_a_check_without_one_is_taken_for_the_table(
    lakehouse: Lakehouse, namespace: str, scope: str | None, action: RunState
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10, scope)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        p.settle(first)
        assert p.settle(second).state is action


def test_the_sensor_asks_for_the_checks_and_nothing_else(lakehouse: Lakehouse, namespace: str) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        p.settle(first)
        repository = p.definitions.get_repository_def()
        with dg.build_sensor_context(
            instance=p.instance,
            repository_def=repository,
            resources={"lakehouse": LakehouseResource.from_settings(lakehouse.settings)},
        ) as context:
            data = repository.get_sensor_def("publication_sensor").evaluate_tick(context)
        (request,) = data.run_requests or []
        assert request.tags[RunTag.CHECKS_FOR] == second
        assert list(request.asset_selection or []) == []
        assert [key.name for key in request.asset_check_keys or []] == ["total"]


def test_a_run_that_repeats_checks_beats(lakehouse: Lakehouse, namespace: str) -> None:
    """Publications wait for it: without a heartbeat nobody would learn of its death."""
    asset = appending(namespace)
    beating: list[str] = []
    store = HeartbeatStore.from_settings(lakehouse.settings)

    @dg.asset_check(asset=asset)
    def watched(context: dg.AssetCheckExecutionContext, appended: pl.DataFrame) -> dg.AssetCheckResult:
        for _ in range(100):
            beating[:] = [beat.branch for beat in store.all() if beat.run_id == context.run.run_id]
            if beating:
                break
            time.sleep(0.05)
        return dg.AssetCheckResult(passed=len(appended) < 100)

    with project(lakehouse, asset, watched) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        p.settle(first)
        checks = check_run(p, p.settle(second))
        assert beating == [run_branch_name(checks)]
        assert run_branch_name(checks) not in p.branches()
        assert p.settle(second).state is RunState.PUBLISHED
