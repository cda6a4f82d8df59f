"""The whole way: launch in the UI's API, the daemon's two sensors, and what they leave on `main`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.daemon import daemon_of, launch, wait_for
from branchlake_dagster_tests.dagster_internals import InstigatorState

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(1200)]

SENSOR = "publication_automation_sensor"
MODULE = "branchlake_dagster_tests.publication.automation.automation_project"


@pytest.fixture
def daemon(lakehouse: Lakehouse, namespace: str, tmp_path: Path) -> Iterator[str]:
    with daemon_of(MODULE, lakehouse, namespace, tmp_path) as url:
        yield url


def test_the_daemon_requests_the_downstream_of_what_it_published(
    daemon: str, lakehouse: Lakehouse, namespace: str
) -> None:
    with dg.DagsterInstance.get() as instance:

        def state() -> InstigatorState | None:
            return next((s for s in instance.all_instigator_state() if s.name == SENSOR), None)

        def evaluated() -> bool:
            found = state()
            return found is not None and bool(getattr(found.instigator_data, "cursor", None))

        def ticks() -> int:
            found = state()
            return len(instance.get_ticks(found.instigator_origin_id, found.selector_id)) if found else 0

        def runs_of(name: str) -> list[dg.DagsterRun]:
            key = dg.AssetKey([namespace, name])
            return [run for run in instance.get_runs() if key in (run.asset_selection or ())]

        wait_for(evaluated)
        blocked = launch(daemon, MODULE, namespace, "blocked")
        launch(daemon, MODULE, namespace, "prices")
        wait_for(lambda: lakehouse.catalog().table_exists((namespace, "report")))
        rows = lakehouse.catalog().load_table((namespace, "report")).scan().to_arrow().to_pylist()
        assert rows == [{"n": 3}]
        wait_for(lambda: instance.get_run_by_id(blocked).tags.get(RunTag.VERDICT) == "blocked")
        (run,) = runs_of("report")
        assert run.tags["dagster/sensor_name"] == SENSOR
        before = ticks()
        wait_for(lambda: ticks() > before + 1)
        assert len(runs_of("report")) == 1
        assert runs_of("never") == []
