"""The SDA graph on the stack of deploy/compose.yaml: Nessie and Dagster on Postgres, a Spark cluster, S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.commands.simulated_window import land_simulated_window
from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import FIRST_WINDOW, gp_snapshots, windows
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT
from branchlake_dagster.sda.windows import to_microseconds
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import project, retry
from branchlake_dagster_tests.publication.gate.retried_checks import Amounts

pytestmark = [
    pytest.mark.timeout(600),
    # Dagster 1.13 warns about its own tags of multi-dimensional partitions.
    pytest.mark.filterwarnings("ignore:Non-compliant tag keys:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def instance(remote_environment: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.get() as made:
        yield made


@pytest.fixture(scope="module")
def lake(remote_environment: pytest.MonkeyPatch) -> Lakehouse:
    made = Lakehouse(Settings())
    ensure_main_has_commit(made.nessie)
    return made


def test_dagster_keeps_its_runs_in_postgres(instance: dg.DagsterInstance) -> None:
    assert type(instance.run_storage).__name__ == "PostgresRunStorage"
    assert type(instance.event_log_storage).__name__ == "PostgresEventLogStorage"
    assert type(instance.schedule_storage).__name__ == "PostgresScheduleStorage"


def test_the_doctor_finds_nothing_wrong(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    told = json.loads(done.stdout)
    states = {(one["place"], one["looked_at"]): one for one in told["findings"]}
    assert done.exit_code == 0, told
    assert {one["state"] for one in states.values()} == {"right"}
    assert "Postgres" in states["Dagster", "storage"]["told"]
    assert [ref.name for ref in lake.nessie.references() if ref.name.startswith("doctor-")] == []


def test_the_graph_is_published_on_the_whole_stack(instance: dg.DagsterInstance, lake: Lakehouse) -> None:
    assert lake.servers.server_names() == (), "nothing is embedded"
    definitions = build_definitions(lake.settings)
    few = {"gp": {"config": {"simulated_objects": 150}}}
    reconciler = Reconciler.from_lake(lake, instance, definitions.get_repository_def().asset_graph)
    instance.add_dynamic_partitions(gp_snapshots.name or "", [DEFAULT_SNAPSHOT])

    def run(job: str, partition: str | None) -> str:
        done = definitions.resolve_job_def(job).execute_in_process(
            instance=instance,
            partition_key=partition,
            raise_on_error=False,
            run_config={"resources": few, "loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )
        failures = [e.step_failure_data.error for e in done.all_events if e.is_step_failure]
        assert done.success, failures
        return done.run_id

    def tags(run_id: str) -> dict[str, str]:
        found = instance.get_run_by_id(run_id)
        assert found is not None
        return dict(found.tags)

    catalogue = run("catalogue_job", DEFAULT_SNAPSHOT)
    list(reconciler.reconcile_branches())
    assert RunTag.PUBLICATION in tags(catalogue), tags(catalogue)

    objects = lake.catalog().load_table(("sda", "catalogue")).scan().to_arrow().sort_by("sat_no")
    start = to_microseconds(datetime.strptime(FIRST_WINDOW, windows.fmt).replace(tzinfo=UTC))
    land_simulated_window(
        lake.settings.landing_folder,
        Elements.from_arrow(objects),
        start=start,
        end=start + 3_600_000_000,
        seed=1,
    )
    for name in ("radar", "optical", "links"):
        run(f"ingest_{name}_job", None)
    list(reconciler.reconcile_branches())
    observed = run("observations_job", FIRST_WINDOW)
    list(reconciler.reconcile_branches())
    assert RunTag.PUBLICATION in tags(observed), tags(observed)

    for job in ("tracks_job", "window_job"):
        window = run(job, FIRST_WINDOW)
        list(reconciler.reconcile_branches())
        assert RunTag.PUBLICATION in tags(window), tags(window)

    tables = {name: lake.catalog().load_table(("sda", name)) for _, name in lake.catalog().list_tables("sda")}
    assert all(table.location().startswith("s3://lake/warehouse/sda/") for table in tables.values())
    rows = {name: table.scan().to_arrow().num_rows for name, table in tables.items()}
    assert rows["catalogue"] == 150
    assert rows["observations"] == sum(rows[f"raw_{name}"] for name in ("radar", "optical", "links")) > 0
    assert rows["fused_tracks"] > 0
    assert [ref.name for ref in lake.nessie.references() if ref.name.startswith("run-")] == []


def test_a_retry_that_skips_a_check_is_blocked_with_events_in_postgres(
    instance: dg.DagsterInstance, lake: Lakehouse, namespace: str
) -> None:
    amounts = Amounts(namespace)
    with project(lake, *amounts.definitions, instance=instance) as p:
        parent = p.run(ok=False)
        amounts.value, amounts.report_fails = -1, False
        child = retry(p, parent, amounts.steps["amounts"], amounts.steps["report"])
        assert p.settle(child).state is RunState.BLOCKED
