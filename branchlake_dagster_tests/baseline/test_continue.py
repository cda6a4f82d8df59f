"""Today's code continues a lake and a Dagster home that an earlier version stored.

The tests share one copy of it and publish to its `main`; each has assets and runs of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster.automation.backfill_stages import approve_results
from branchlake_dagster.cli.main import main
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.ingest.offsets import TableProgress, recorded_ingestions
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.publication.parked_runs import iter_parked_runs
from branchlake_dagster.publication.parked_runs import retry_parked_run as try_again
from branchlake_dagster.runs.branch_owner import BatchBranch
from branchlake_dagster.runs.discarding import discarded_tag_name, restore_branch
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.runs.leases import Lease, lease_keys
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import Retention, RunState, find_run_location
from branchlake_dagster.stored_names import LakeProperty, RunTag
from branchlake_dagster_tests.baseline import shop
from branchlake_dagster_tests.baseline.names import classes_in_home, names_of_run, stored_names
from branchlake_dagster_tests.baseline.opened import AUTOMATION, Opened, key, opened
from branchlake_dagster_tests.baseline.storage import EXPECTED, object_store, settings_of, unpack
from branchlake_dagster_tests.conftest import LAKES
from branchlake_dagster_tests.dagster_internals import AssetDaemonCursor, whitelisted_classes
from branchlake_dagster_tests.harness import retry
from branchlake_dagster_tests.publication.reconcile.test_recheck import check_run

pytestmark = pytest.mark.nessie


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text())
    return found


@pytest.fixture(scope="module")
def p(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The stored lake, unpacked, with its Nessie."""
    state_dir = tmp_path_factory.mktemp("baseline") / "state"
    with object_store() as endpoint, settings_of(state_dir, endpoint) as settings:
        unpack(state_dir, endpoint)
        with opened(settings) as found:
            found.shop.number = 1_000  # its rows have ids that the stored ones do not have
            yield found


@pytest.fixture
def runs(expected: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = expected["runs"]
    return found


def tags(p: Opened, run_id: str) -> dict[str, str]:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return dict(run.tags)


def ids(p: Opened, *table: str, ref: str = MAIN) -> list[int]:
    return sorted(row["id"] for row in p.rows(*table, ref=ref))


def publish(p: Opened, run_id: str) -> None:
    outcome = p.settle(run_id)
    assert outcome.state is RunState.PUBLISHED, outcome


def publish_holder(p: Opened, runs: dict[str, str]) -> None:
    """Publish the stored run that holds a lease, unless an earlier test has done so."""
    if run_branch_name(runs["leased"]) in {ref.name for ref in p.lake.nessie.references()}:
        publish(p, runs["leased"])


# -- before anything has changed -----------------------------------------------------------------------


def test_all_stored_names_exist(p: Opened, expected: dict[str, Any]) -> None:
    """What this reads is read with today's clients; the names it finds are those of the past."""
    endpoint = p.lake.settings.s3_endpoint
    assert endpoint is not None
    found = stored_names(p, endpoint)
    for kind, name in (("job name", "undo_publication"), ("sensor metadata", "branchlake/watched_assets")):
        found[kind].remove(name)  # of a later version
    assert found == expected["names"]


def test_main_and_its_tables_are_read(p: Opened, expected: dict[str, Any], runs: dict[str, str]) -> None:
    assert p.lake.nessie.reference(MAIN).hash == expected["main"]
    assert sorted(ref.name for ref in p.lake.nessie.references()) == expected["references"]
    for name, stored in expected["tables"].items():
        rows = p.rows(*name.split("."))
        assert sorted((row.get("id") for row in rows), key=str) == stored, name
    ledger = {one.run_id: one for one in iter_publications(p.lake.nessie)}
    assert ledger[runs["published_visits"]].tables == ("shop.visits",)
    assert ledger[runs["rebased"]].branch == run_branch_name(runs["rebased"])


def test_commands_read_the_lake(p: Opened, expected: dict[str, Any], runs: dict[str, str]) -> None:
    def answer(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert result.exit_code in (0, code), result.output
        return json.loads(result.stdout)

    status = answer("status")
    assert status["main"] == expected["main"]
    states = {one["run_id"]: one["state"] for one in status["branches"]}
    assert {runs["waiting"], runs["leased"], runs["parked"], runs["live"]} <= states.keys()
    assert runs["fenced"] in str(status["discarded"])
    assert [one["run_id"] for one in answer("set-aside")] == [runs["parked"]]
    consumers = {one["table"]: one for one in answer("consumers")["consumers"]}
    assert {"shop.copies", "shop.sums", "shop.latest"} == consumers.keys()
    assert (consumers["shop.copies"]["unconsumed_rows"], consumers["shop.copies"]["trouble"]) == (4, None)
    assert answer("doctor", code=1)["findings"]
    reaped = CliRunner().invoke(main, ["reap", "--dry-run"])
    assert reaped.exit_code == 0, reaped.output
    assert run_branch_name(runs["waiting"]) not in _lines(reaped.output, "discard")


def _lines(text: str, word: str) -> str:
    return "\n".join(line for line in text.splitlines() if word in line)


def test_the_dagster_home_is_read(p: Opened, expected: dict[str, Any], runs: dict[str, str]) -> None:
    assert p.cursors() == expected["cursors"]
    states = {
        "waiting": "pending",
        "published_prices": "published",
        "failed": "failed",
        "refused": "refused",
        "blocked": "blocked",
        "unbranched": "unbranched",
    }
    assert {name: tags(p, runs[name])[RunTag.STATUS] for name in states} == states
    place = find_run_location(tags(p, runs["waiting"]), runs["waiting"])
    assert place is not None
    assert (place.branch, place.base_hash != "") == (run_branch_name(runs["waiting"]), True)
    kept = Retention.from_run_tags(tags(p, runs["failed"]), runs["failed"])
    assert kept is not None
    assert kept.discard_grace.total_seconds() == p.lake.settings.discard_grace_h * 3_600
    event = p.instance.get_latest_materialization_event(key("visits"))
    assert event is not None
    assert event.run_id == runs["backlog"]
    check = dg.AssetCheckKey(key("prices"), "positive")
    records = p.instance.event_log_storage.get_asset_check_execution_history(check, limit=100)
    by_run = {record.run_id: record.status.value for record in records}
    assert (by_run[runs["blocked"]], by_run[runs["published_prices"]]) == ("FAILED", "SUCCEEDED")
    backfill = p.instance.get_backfill(runs["backfill"])
    assert backfill is not None
    assert backfill.tags["branchlake/approval"] == "required"


def test_all_objects_in_the_dagster_home_are_known_to_dagster(p: Opened) -> None:
    """Dagster stores the names of classes, of which none is ours: ours may be renamed."""
    known = {*whitelisted_classes()}
    stored = classes_in_home(p.lake.settings.state_dir / "dagster")
    assert {"PipelineRun", "PartitionBackfill"} <= stored
    assert stored - known == set()


def test_leases_heartbeats_and_live_branches_are_read(p: Opened, runs: dict[str, str]) -> None:
    lease = Lease.from_contents("ledger", p.lake.nessie.contents(MAIN, lease_keys(["ledger"])))
    assert (lease.holder, lease.token) == (run_branch_name(runs["leased"]), 3)
    (beat,) = HeartbeatStore.from_settings(p.lake.settings).all()
    assert (beat.run_id, beat.kind, beat.interval_s) == (runs["leased"], "run", 10.0)
    batch = BatchBranch.from_name(runs["live_batch"])
    assert batch is not None
    assert batch.run_id == runs["live"]


# -- it goes on ----------------------------------------------------------------------------------------


def test_the_waiting_run_is_published(p: Opened, runs: dict[str, str]) -> None:
    """A publisher had claimed it before it died."""
    waiting = ids(p, "shop", "prices", ref=run_branch_name(runs["waiting"]))
    outcome = p.settle(runs["waiting"])
    assert outcome.state is RunState.PUBLISHED, outcome
    assert ids(p, "shop", "prices") == waiting
    assert tags(p, runs["waiting"])[RunTag.STATUS] == "published"


def test_a_run_that_wrote_by_its_own_code_is_published(p: Opened, runs: dict[str, str]) -> None:
    """What it has read and which of its commits its own code made is in its events and commits."""
    before = ids(p, "shop", "own")
    written = ids(p, "shop", "own", ref=run_branch_name(runs["waiting_own"]))
    publish(p, runs["waiting_own"])
    assert ids(p, "shop", "own") == written != before


def test_the_blocked_run_keeps_its_reason(p: Opened, runs: dict[str, str]) -> None:
    before = tags(p, runs["blocked"])
    assert "positive" in before[RunTag.REASON]
    assert before[RunTag.VERDICT] == "blocked"
    again = p.with_settings(keep_failed_hours=p.lake.settings.discard_grace_h)
    again.reconciler().reconcile_run(runs["blocked"])
    assert tags(p, runs["blocked"]) == before
    assert {row["price"] for row in p.rows("shop", "prices", ref=run_branch_name(runs["blocked"]))} == {-1}
    assert {row["price"] for row in p.rows("shop", "prices")}.isdisjoint({-1})


def test_a_fenced_run_that_passed_gets_its_branch_back(p: Opened, runs: dict[str, str]) -> None:
    branch = run_branch_name(runs["fenced"])
    tag = p.lake.nessie.reference(discarded_tag_name(branch))
    assert restore_branch(p.lake.nessie, branch, tag)
    written = ids(p, "shop", "stock", ref=branch)
    publish(p, runs["fenced"])
    assert {*written} >= {row["id"] for row in p.rows("shop", "stock") if row["region"] == "south"} != set()


def test_a_failed_run_is_retried_from_its_discarded_branch(p: Opened, runs: dict[str, str]) -> None:
    before = ids(p, "shop", "first")
    written = ids(p, "shop", "first", ref=discarded_tag_name(run_branch_name(runs["failed"])))
    again = retry(p, runs["failed"], assets=[key("first"), key("second")])
    publish(p, again)
    new = {*written} - {*before}
    assert len(new) == 2
    assert ids(p, "shop", "first") == sorted([*before, *new])


def test_a_run_that_was_parked_is_taken_up_again(p: Opened, runs: dict[str, str]) -> None:
    (run,) = iter_parked_runs(p.instance)
    assert run.run_id == runs["parked"]
    assert p.settle(run.run_id).state is RunState.PARKED
    try_again(p.instance, run)
    publish(p, run.run_id)


def test_a_prepared_publication_is_checked_and_published(p: Opened, runs: dict[str, str]) -> None:
    asked = p.settle(runs["checked_again"])
    assert asked.state is RunState.CHECKING
    assert asked.check_run is not None
    assert asked.check_run.branch == f"publish-{runs['checked_again']}"
    check_run(p, asked)
    publish(p, runs["checked_again"])


def test_the_holder_of_a_lease_publishes_and_the_next_one_gets_the_next_token(
    p: Opened, runs: dict[str, str]
) -> None:
    before = Lease.from_contents("ledger", p.lake.nessie.contents(MAIN, lease_keys(["ledger"])))
    publish(p, runs["leased"])
    after = p.run(key("ledger"))
    lease = Lease.from_contents("ledger", p.lake.nessie.contents(MAIN, lease_keys(["ledger"])))
    assert (lease.holder, lease.token) == (run_branch_name(after), before.token + 1)
    publish(p, after)


def test_a_consumer_goes_on_from_its_position(p: Opened, expected: dict[str, Any]) -> None:
    """No row twice, none lost; the sensor goes on from its cursor."""
    table = p.lake.catalog(MAIN).load_table(("shop", "copies"))
    assert "shop.visits" in ConsumptionRecord.from_json(table.properties[LakeProperty.CONSUMED]).inputs
    before = ids(p, "shop", "copies")
    assert len(ids(p, "shop", "visits")) > len(before)
    result = p.tick("incremental_sensor", expected["cursors"]["incremental_sensor"])
    (request,) = [one for one in result.run_requests if one.asset_selection == [key("copies")]]
    publish(p, p.requested(request))
    assert ids(p, "shop", "copies") == ids(p, "shop", "visits")
    publish(p, p.run(key("visits")))
    publish(p, p.run(key("copies")))
    assert ids(p, "shop", "copies") == ids(p, "shop", "visits")


def test_a_result_that_waits_for_approval_is_consumed_after_it(p: Opened, runs: dict[str, str]) -> None:
    def requested() -> set[str | None]:
        found = p.tick("incremental_sensor", None).run_requests
        return {one.partition_key for one in found if one.asset_selection == [key("sums")]}

    assert "2026-08-01" not in requested()
    approval = approve_results(p.instance, runs["backfill"])
    assert runs["unapproved"] in {run.run_id for run in approval.approved_runs}
    assert "2026-08-01" in requested()
    publish(p, p.run(key("sums"), partition="2026-08-01"))
    sums = {str(row["day"]): row["price"] for row in p.rows("shop", "sums")}
    sales = [row["price"] for row in p.rows("shop", "sales") if str(row["day"]) == "2026-08-01"]
    assert sums["2026-08-01"] == sum(sales)


def test_a_sensor_that_follows_publications_goes_on_from_its_cursor(
    p: Opened, expected: dict[str, Any], runs: dict[str, str]
) -> None:
    result = p.tick("after_visits", expected["cursors"]["after_visits"])
    known = {run.tags.get("branchlake/after_run") for run in p.instance.get_runs()}
    assert known >= {runs["followed_run"]}
    assert {one.tags["branchlake/after_run"] for one in result.run_requests}.isdisjoint(known - {None})


def test_an_automation_condition_goes_on_from_its_cursor(p: Opened, expected: dict[str, Any]) -> None:
    """Dagster finds what it remembers of a condition by a hash over its `name`, which is therefore a stored name."""
    cursor = p.automation_cursor(expected["cursors"][AUTOMATION])
    follower = dg.AssetSelection.assets(key("follower"))
    first = dg.evaluate_automation_conditions(p.definitions, p.instance, follower, cursor=cursor)
    assert _nodes(cursor) == _nodes(first.cursor) != set()
    assert first.get_num_requested(key("follower")) == 1  # visits were published after its last evaluation
    again = dg.evaluate_automation_conditions(p.definitions, p.instance, follower, cursor=first.cursor)
    assert again.total_requested == 0


def _nodes(cursor: AssetDaemonCursor) -> set[str]:
    """The conditions of which the cursor remembers something, by their hashes."""
    return {name for one in cursor.previous_condition_cursors or () for name in one.node_cursors_by_unique_id}


def test_the_same_asset_stores_the_same_names_today(p: Opened, runs: dict[str, str]) -> None:
    publish_holder(p, runs)  # the run of `ledger` needs the lease
    partitions = {"stock": "north", "readings": "2026-08-01|north"}
    for name in ("prices", "visits", "customers", "ledger", *partitions):
        run_id = p.run(key(name), partition=partitions.get(name))
        publish(p, run_id)
        assert names_of_run(p, run_id, name) == names_of_run(p, runs[f"published_{name}"], name), name


@pytest.mark.spark
def test_the_ingestion_goes_on_exactly_once(
    p: Opened, expected: dict[str, Any], runs: dict[str, str], pytestconfig: Any
) -> None:
    table = p.lake.catalog(MAIN).load_table(("events", "every"))
    recorded = TableProgress.from_json(recorded_ingestions(table.properties)[shop.INGESTION])
    assert recorded.run_id == runs["live"]
    dead = len(p.rows("events", "events_dead_letters"))
    lakes, state_dir = pytestconfig.stash[LAKES], p.lake.settings.state_dir
    lakes.lend_spark(state_dir)
    try:
        publish(p, p.ingest())
        p.land({"id": 8, "kind": "c"}, b"no record either")
        publish(p, p.ingest())
    finally:
        lakes.take_spark_back(Path(state_dir))
    assert ids(p, "events", "every") == [*range(1, 9)]
    by_name = {name: ids(p, "events", name) for name in ("a", "b", "c")}
    assert by_name == {"a": [1, 3, 4, 6], "b": [2, 5], "c": [7, 8]}
    assert len(p.rows("events", "events_dead_letters")) == dead + 1
    letters = p.lake.catalog(MAIN).load_table(("events", "events_dead_letters"))
    assert sorted(letters.schema().column_names) == expected["names"]["dead letter column"]
