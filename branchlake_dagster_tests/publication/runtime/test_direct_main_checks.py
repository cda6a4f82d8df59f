"""The fallback: no branch could be made, the run wrote to `main`, and its checks are judged."""

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publication_sensor import judge_unbranched_runs
from branchlake_dagster.runs.run_branch import FALLBACK_WARNING
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def lake(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    """The shared lake, whose Nessie makes no branches."""

    def refuse(*_: object, **__: object) -> None:
        raise NessieUnavailable("Nessie makes no branches today.", status=503)

    monkeypatch.setattr(NessieClient, "create_branch", refuse)
    return Lakehouse(lakehouse.settings.model_copy(update={"when_unavailable": "direct_main"}))


def checked(namespace: str, *, passed: bool) -> tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]:
    @dg.asset(key=[namespace, "t"])
    def written() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset_check(asset=written)
    def good(written: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=passed and len(written) == 1, description="as told")

    return written, good


def settle(p: Project) -> list[Outcome]:
    return list(judge_unbranched_runs(p.lake, p.instance, p.graph))


def test_a_run_without_a_branch_writes_to_main_and_says_so(
    lake: Lakehouse, namespace: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with project(lake, *checked(namespace, passed=True)) as p:
        run_id = p.run()
        assert p.rows(namespace, "t") == [{"n": 1}]
        assert FALLBACK_WARNING in capfd.readouterr().err
        run = p.instance.get_run_by_id(run_id)
        assert (run.tags[RunTag.BRANCH], run.tags[RunTag.UNBRANCHED]) == ("main", "true")
        (outcome,) = settle(p)
        assert (outcome.state, outcome.run_id) == (RunState.UNBRANCHED, run_id)
        assert "its checks passed" in outcome.detail
        assert outcome.publication == lake.nessie.reference("main").hash
        assert p.instance.get_run_by_id(run_id).tags[RunTag.VERDICT] == "passed"
        assert p.instance.get_run_by_id(run_id).is_success
        assert settle(p) == []


def test_a_failing_check_on_main_is_loud(lake: Lakehouse, namespace: str) -> None:
    with project(lake, *checked(namespace, passed=False)) as p:
        run_id = p.run()
        (outcome,) = settle(p)
        assert outcome.detail.startswith("Manual validation needed: the run wrote to main directly")
        assert f"check good on {namespace}/t failed: as told" in outcome.detail
        assert outcome.publication is None
        run = p.instance.get_run_by_id(run_id)
        assert run.is_failure
        assert run.tags[RunTag.REASON].startswith("Manual validation needed")
        (told,) = p.observations([namespace, "t"])
        assert "Manual validation needed" in (told.description or "")
        assert settle(p) == []


def test_a_run_without_a_check_is_not_called_published(lake: Lakehouse, namespace: str) -> None:
    with project(lake, checked(namespace, passed=True)[0]) as p:
        p.run()
        (outcome,) = settle(p)
        assert outcome.verdict is not None
        assert (outcome.verdict.codes, outcome.publication) == (("no_check",), None)


def test_without_the_setting_the_run_fails(lake: Lakehouse, lakehouse: Lakehouse, namespace: str) -> None:
    with project(lakehouse, *checked(namespace, passed=True)) as p:
        p.run(ok=False)
        p.failed_with(NessieUnavailable, "makes no branches")
        assert settle(p) == []
        assert not lakehouse.catalog().table_exists((namespace, "t"))
