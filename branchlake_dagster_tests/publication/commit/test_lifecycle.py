"""From a run to `main`, with real Iceberg tables: publication, the gate's refusals, clean-up."""

import uuid

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.cleanup.jobs import reap_branches
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.publication.outcome import find_other_location
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.dagster_internals import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def table(namespace: str, name: str, rows: list[int] | None = None) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], io_manager_key="io_manager")
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": rows if rows is not None else [1, 2, 3]})

    return made


def check(
    asset: dg.AssetsDefinition, *, passed: bool = True, severity: str = "ERROR", name: str = "good"
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset.key, name=name)
    def verdict() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(
            passed=passed, severity=dg.AssetCheckSeverity(severity), description="as told"
        )

    return verdict


def test_a_passing_run_is_published_in_one_commit_with_its_story(
    lakehouse: Lakehouse, namespace: str
) -> None:
    one, two = table(namespace, "one"), table(namespace, "two", [7])
    with project(lakehouse, one, two, check(one), check(two)) as p:
        before = lakehouse.nessie.reference("main").hash
        run_id = p.run()
        assert not lakehouse.catalog().table_exists((namespace, "one"))

        outcome = p.settle(run_id)

        assert outcome.state is RunState.PUBLISHED
        assert p.rows(namespace, "one") == [{"n": 1}, {"n": 2}, {"n": 3}]
        assert p.rows(namespace, "two") == [{"n": 7}]
        assert run_branch_name(run_id) not in p.branches()
        entry = next(iter(iter_publications(lakehouse.nessie, limit=1)))
        assert entry.hash == outcome.publication
        assert entry.run_id == run_id
        assert entry.tables == (f"{namespace}.one", f"{namespace}.two")
        assert entry.base_hash == before
        tags = p.instance.get_run_by_id(run_id).tags
        assert tags[RunTag.PUBLICATION] == outcome.publication
        assert tags[RunTag.VERDICT] == "passed"
        assert tags[RunTag.BRANCH] == run_branch_name(run_id)
        assert tags[RunTag.BASE_HASH] == before
        told = p.observations([namespace, "one"])
        assert [o.metadata["branchlake/publication"].value for o in told] == [outcome.publication]
        assert told[0].metadata["dagster/row_count"].value == 3


@pytest.mark.parametrize(
    ("severity", "action", "verdict"),
    [
        ("ERROR", RunState.BLOCKED, "blocked"),
        ("WARN", RunState.PUBLISHED, "passed_with_warnings"),
    ],
)
def test_severity_decides(
    lakehouse: Lakehouse, namespace: str, severity: str, action: RunState, verdict: str
) -> None:
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset, passed=False, severity=severity)) as p:
        run_id = p.run()
        outcome = p.settle(run_id)
        assert outcome.state is action
        assert "as told" in outcome.detail
        assert lakehouse.catalog().table_exists((namespace, "t")) is (action is RunState.PUBLISHED)
        assert run_branch_name(run_id) not in p.branches()
        tags = p.instance.get_run_by_id(run_id).tags
        assert tags[RunTag.VERDICT] == verdict
        assert (RunTag.REASON in tags) is (action is RunState.BLOCKED)


def test_a_crashed_check_blocks(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")

    @dg.asset_check(asset=asset.key)
    def crashes() -> dg.AssetCheckResult:
        raise RuntimeError("no answer")

    with project(lakehouse, asset, crashes) as p:
        run_id = p.run(ok=False)
        assert p.settle(run_id).state is RunState.DISCARDED
        assert not lakehouse.catalog().table_exists((namespace, "t"))


def test_no_check_blocks_unless_the_asset_says_so(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "free"], metadata=table_metadata(require_checks=False))
    def free() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, table(namespace, "strict"), free) as p:
        blocked = p.settle(p.run(dg.AssetKey([namespace, "strict"])))
        assert blocked.state is RunState.BLOCKED
        assert blocked.codes == ("no_check",)
        assert p.settle(p.run(dg.AssetKey([namespace, "free"]))).state is RunState.PUBLISHED


def test_a_table_written_behind_the_assets_back_blocks(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")

    @dg.asset(key=[namespace, "sneaky"], metadata=table_metadata(require_checks=False), deps=[asset])
    def sneaky(lakehouse: dg.ResourceParam[object]) -> None:
        catalog = lakehouse.catalog()
        source = catalog.load_table((namespace, "t"))
        catalog.create_table((namespace, "side"), source.schema())

    with project(lakehouse, asset, sneaky, check(asset)) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.BLOCKED
        assert f"{namespace}.side" in outcome.detail


@memory.ON_BOTH
def test_a_conflict_is_refused_and_names_the_other_run(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset)) as p:
        p.settle(p.run())
        first, second = p.run(), p.run()
        assert p.settle(first).state is RunState.PUBLISHED
        outcome = p.settle(second)
        assert outcome.state is RunState.REFUSED
        assert outcome.codes == ("run_replaced_table",)
        assert [name for name in (f"{namespace}.t", first) if name not in outcome.detail] == []
        assert run_branch_name(second) not in p.branches()
        assert p.instance.get_run_by_id(second).tags[RunTag.REASON] == outcome.detail


def test_publishing_again_after_a_lost_tick_reports_the_same_publication_once(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset)) as p:
        run_id = p.run()
        with monkeypatch.context() as patch:
            patch.setattr(
                "branchlake_dagster.publication.finishing.end_branch_and_claim", lambda *_, **__: None
            )
            first = p.reconciler().reconcile_run(run_id)
        again = p.settle(run_id)
        assert first is not None
        assert again.publication == first.publication
        assert len(p.observations([namespace, "t"])) == 1
        assert run_branch_name(run_id) not in p.branches()


@memory.ON_BOTH
def test_a_failed_run_is_discarded_and_main_untouched(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")

    @dg.asset(key=[namespace, "boom"], deps=[asset])
    def boom() -> None:
        raise RuntimeError("no")

    with project(lakehouse, asset, boom, check(asset)) as p:
        before = lakehouse.nessie.reference("main").hash
        run_id = p.run(ok=False)
        assert p.settle(run_id).state is RunState.DISCARDED
        assert lakehouse.nessie.reference("main").hash == before


def test_unknown_runs_are_left_to_the_reaper(lakehouse: Lakehouse) -> None:
    main = lakehouse.nessie.reference("main").hash
    branch = lakehouse.nessie.create_branch(f"run-{uuid.uuid4()}", from_ref="main", from_hash=main)
    with project(lakehouse) as p:
        found = [o for o in p.reconciler().reconcile_branches() if o.branch == branch.name]
        assert [o.state for o in found] == [RunState.UNKNOWN_RUN]
    lakehouse.nessie.delete_branch(branch.name, expected_hash=branch.hash)


def test_a_full_reexecution_opens_a_branch_of_its_own(lakehouse: Lakehouse, namespace: str) -> None:
    """Dagster copies the parent's tags: its base hash and verdict are not the new run's."""
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset)) as p:
        parent = p.run()
        p.settle(parent)
        inherited = dict(p.instance.get_run_by_id(parent).tags)
        again = p.run(tags=inherited)
        tags = p.instance.get_run_by_id(again).tags
        assert tags[RunTag.BRANCH] == run_branch_name(again)
        assert tags[RunTag.VERDICT] == "pending"
        assert tags[RunTag.PUBLICATION] == "none"
        outcome = p.settle(again)
        assert outcome.state is RunState.PUBLISHED
        assert p.instance.get_run_by_id(again).tags[RunTag.PUBLICATION] == outcome.publication
        assert len(p.observations([namespace, "t"])) == 2


def test_a_reexecution_waiting_for_its_verdict_is_not_reaped(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset)) as p:
        parent = p.run()
        p.settle(parent)
        again = p.run(tags=dict(p.instance.get_run_by_id(parent).tags))
        found = {r.run_id: r for r in reap_branches(lakehouse, p.instance, dry_run=True)}
        assert not found[again].deletes_branch
        assert found[again].reason.code == "awaiting_publication"
        p.settle(again)


def test_runs_of_another_code_location_are_left_to_its_sensor(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace, "t")
    with project(lakehouse, asset, check(asset)) as p:
        run_id = p.run()
        origin = RemoteJobOrigin(
            RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("elsewhere"), "__repository__"), "__ASSET_JOB"
        )
        run = p.instance.get_run_by_id(run_id)._replace(remote_job_origin=origin)
        assert find_other_location(run, "here") == "elsewhere"
        assert find_other_location(run, "elsewhere") is None
        assert find_other_location(run, None) is None
        p.settle(run_id)
