"""A batch as a Dagster run: its events and checks, its publication, its second attempts, and its rivals."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T  # noqa: N812 - the name every Spark reader expects
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from branchlake_dagster.ingest import batch_assets
from branchlake_dagster.ingest.batch_report import topic_key
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions, live_sensor
from branchlake_dagster.ingest.ingest_sensor import build_batch_sensor, observe_topics, plan_batch_on_main
from branchlake_dagster.ingest.planning import CommittedOffsets, StartingOffsets
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.run_publication import RunOutcome, publish
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import NO_VALUE, RunState
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.ingest.test_live import AT, COLUMNS, ids, record, run_branches, two_tables
from branchlake_dagster_tests.ingest.test_taking_over import a_group, an_ingestion, held, send
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.kafka import Broker, Message, as_settings

pytestmark = pytest.mark.spark


@dataclass
class Project:
    """A code location with one ingestion."""

    lake: Lakehouse
    instance: dg.DagsterInstance
    ingest: Ingest
    definitions: dg.Definitions

    def run(self, *, ok: bool = True, tags: Mapping[str, str] | None = None) -> dg.ExecuteInProcessResult:
        job = self.definitions.resolve_job_def(f"ingest_{self.ingest.name}_job")
        result = job.execute_in_process(instance=self.instance, raise_on_error=False, tags=dict(tags or {}))
        assert result.success is ok, [e.message for e in result.all_events if e.is_failure]
        return result

    def publish(self, result: dg.ExecuteInProcessResult) -> RunOutcome:
        return publish(result, self.definitions, instance=self.instance)

    def ids(self, kind: str) -> list[int]:
        return ids(self.lake, self.ingest, kind)

    def dead(self) -> list[bytes]:
        letters = (self.ingest.name, f"{self.ingest.name}_dead_letters")
        found = self.lake.catalog("main").load_table(letters).scan().to_arrow()["value"]
        return sorted(found.to_pylist())


Opened = Callable[[Ingest], Project]


@pytest.fixture
def project(lakehouse: Lakehouse, spark_session: Any, kafka: Broker) -> Iterator[Opened]:
    lake = Lakehouse(Settings(state_dir=lakehouse.settings.state_dir, **as_settings(kafka.cluster)))
    with new_instance() as instance:

        def opened(ingest: Ingest) -> Project:
            merged = branchlake_definitions(
                lakehouse=LakehouseResource.from_settings(lake.settings),
                definitions=dg.Definitions.merge(
                    ingest_definitions(ingest), dg.Definitions(executor=dg.in_process_executor)
                ),
            )
            return Project(lake, instance, ingest, merged)

        yield opened


def checks(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    found = [
        each.asset_check_evaluation_data
        for each in result.all_events
        if each.event_type_value == "ASSET_CHECK_EVALUATION"
    ]
    return {f"{one.asset_key.path[-1]}.{one.check_name}": one.passed for one in found}


def metadata(result: dg.ExecuteInProcessResult, table: str) -> dict[str, Any]:
    (found,) = [
        each.materialization
        for each in result.all_events
        if each.is_step_materialization and each.asset_key.path[-1] == table
    ]
    return dict(found.metadata)


def test_a_record_that_fails_its_batch_is_a_dead_letter_of_the_run(project: Opened, kafka: Broker) -> None:
    """Spark's Kafka source cannot hold the time of a producer that writes nanoseconds as milliseconds."""
    topic = kafka.topic(message_timestamp_after_max_ms=str((1 << 63) - 1), retention_ms="-1")
    p = project(two_tables(topic))
    kafka.send(topic, [record(1), replace(record(2), at=AT * 1_000_000), record(3, "b")])
    result = p.run()
    letters = f"{p.ingest.name}_dead_letters"
    told = metadata(result, letters)
    assert (told["branchlake/dead_letters"].value, told["branchlake/records"].value) == (1, 3)
    assert "unwritable" in told["branchlake/notes"].value
    assert p.publish(result).published
    assert (p.ids("a"), p.ids("b"), p.dead()) == ([1], [3], [record(2).value])


def test_a_run_is_one_batch_with_its_events(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    p = project(two_tables(topic, most_records=3))
    kafka.send(topic, [record(1), record(2, "b"), Message(b"no", partition=1, at=AT + 9_000), record(3, "b")])
    result = p.run()
    letters = f"{p.ingest.name}_dead_letters"
    assert checks(result) == {"a.converted": True, "b.converted": True, f"{letters}.tolerated": True}
    told = metadata(result, letters)
    assert told["branchlake/lag"].value == 1
    assert told["branchlake/records"].value == 3
    assert told["branchlake/dead_letters"].value == 1
    assert told["branchlake/rows_of_batch"].value == 1
    spans = {
        (row.data["topic"], row.data["partition"]): (row.data["first"], row.data["last"])
        for row in told["branchlake/offsets"].records
    }
    assert spans == {(topic, 0): (0, 1), (topic, 1): (0, 0)}
    assert told["branchlake/valid_through"].value == (AT + 2_000) / 1_000
    assert told["branchlake/commit_id"].value == metadata(result, "a")["branchlake/commit_id"].value
    assert not p.lake.catalog("main").table_exists((p.ingest.name, "a"))
    assert p.publish(result).published
    assert (p.ids("a"), p.ids("b"), p.dead()) == ([1], [2], [b"no"])
    # One partition takes part: the other one's latest time is known from the batch before.
    second = p.run()
    assert metadata(second, "b")["branchlake/valid_through"].value == (AT + 3_000) / 1_000
    assert p.publish(second).published
    assert p.ids("b") == [2, 3]
    nothing = p.run()
    assert not [each for each in nothing.all_events if each.is_step_materialization]
    assert p.publish(nothing).status == "discarded"
    assert run_branches(p.lake) & {f"run-{one.run_id}" for one in (result, second, nothing)} == set()


@pytest.mark.parametrize("how", ["dead_letter", "block"])
def test_rows_that_break_a_contract_are_left_out_or_block_the_batch(
    project: Opened, kafka: Broker, how: Any
) -> None:
    class Positive(pa.DataFrameModel):
        id: T.LongType() = pa.Field(gt=0)

    topic = kafka.topic()
    name = f"i{uuid.uuid4().hex[:8]}"
    a = IngestTable(key=[name, "a"], columns=COLUMNS, contract=Positive, route="a")
    b = IngestTable(key=[name, "b"], columns=COLUMNS, route="b")
    p = project(Ingest(name=name, topics=[topic], tables=[a, b], route_by="kind", on_contract=how))
    kafka.send(topic, [record(1), Message(b'{"id": -1, "kind": "a"}'), record(2, "b")])
    result = p.run()
    assert checks(result)["a.converted"] is False
    assert checks(result)["b.converted"] is True
    outcome = p.publish(result)
    if how == "block":
        assert outcome.status == "blocked"
        assert f"converted on {name}/a failed" in outcome.reasons[0]
        assert not p.lake.catalog("main").table_exists((name, "b"))
    else:
        assert outcome.published
        assert outcome.warnings
        assert (p.ids("a"), p.ids("b"), p.dead()) == ([1], [2], [b'{"id": -1, "kind": "a"}'])


@pytest.mark.soak  # test_a_second_attempt_does_not_get_a_bad_batch_through
def test_more_dead_letters_than_are_tolerated_block_the_run(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic, tolerance=0.2))
    kafka.send(topic, [record(1), Message(b"no")])
    outcome = p.publish(p.run())
    assert outcome.status == "blocked"
    assert "50.00%" in outcome.reasons[0]
    assert not p.lake.catalog("main").table_exists((p.ingest.name, "a"))


def test_a_run_reports_the_tables_that_its_records_name(project: Opened, kafka: Broker) -> None:
    """They have no definition in the code location, and are assets all the same."""
    topic, name = kafka.topic(), f"i{uuid.uuid4().hex[:8]}"
    family = IngestTable(key=[name, "{route}"], columns=COLUMNS)
    p = project(Ingest(name=name, topics=[topic], tables=[family], route_by="kind", tolerance=0.5))
    kafka.send(topic, [record(1), record(2, "b"), record(3)])
    first = p.run()
    assert checks(first) == {"a.converted": True, "b.converted": True, f"{name}_dead_letters.tolerated": True}
    told = metadata(first, "a")
    assert told["branchlake/rows_of_batch"].value == 2
    assert told["dagster/table_name"].value == f"{name}.a"
    outcome = p.publish(first)
    assert outcome.published, outcome
    assert (p.ids("a"), p.ids("b")) == ([1, 3], [2])
    page = p.instance.fetch_observations(dg.AssetKey([name, "a"]), limit=1).records[0].asset_observation
    assert page is not None
    assert page.metadata["dagster/row_count"].value == 2
    # A run that is blocked takes back what it has told of them.
    kafka.send(topic, [record(4, "c"), record(5, ".."), Message(b"no"), Message(b"nor")])
    outcome = p.publish(p.run())
    assert outcome.status == "blocked"
    assert not p.lake.catalog("main").table_exists((name, "c"))
    kafka.send(topic, [record(number, "c") for number in (6, 7, 8)])
    assert p.publish(p.run()).published
    assert p.ids("c") == [4, 6, 7, 8]


def test_a_table_that_a_failed_attempt_created_is_removed(
    project: Opened, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, name = kafka.topic(), f"i{uuid.uuid4().hex[:8]}"
    family = IngestTable(key=[name, "{route}"], columns=COLUMNS)
    p = project(Ingest(name=name, topics=[topic], tables=[family], route_by="kind"))
    kafka.send(topic, [record(1), record(2, "b")])
    _fails_once(monkeypatch)
    assert p.publish(p.run()).published
    assert (p.ids("a"), p.ids("b"), p.dead()) == ([1], [2], [])


def _fails_once(monkeypatch: pytest.MonkeyPatch, told_by: str = "_iter_materializations") -> None:
    """The step fails after its commit, before anybody is told."""
    tell, failures = getattr(batch_assets, told_by), iter([True])

    def fails(*args: Any, **named: Any) -> Any:
        if next(failures, False):
            raise dg.RetryRequested(max_retries=1)
        return tell(*args, **named)

    monkeypatch.setattr(batch_assets, told_by, fails)


def test_a_step_that_failed_after_its_commit_is_done_anew(
    project: Opened, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic))
    kafka.send(topic, [record(1), Message(b"no")])
    assert p.publish(p.run()).published
    kafka.send(topic, [record(2), record(3, "b"), Message(b"nor")])
    _fails_once(monkeypatch)
    result = p.run()
    assert metadata(result, "a")["branchlake/rows_of_batch"].value == 1
    assert metadata(result, f"{p.ingest.name}_dead_letters")["branchlake/records"].value == 3
    assert p.publish(result).published
    assert (p.ids("a"), p.ids("b"), p.dead()) == ([1, 2], [3], [b"no", b"nor"])


def test_a_second_attempt_does_not_get_a_bad_batch_through(
    project: Opened, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic, tolerance=0.2))
    kafka.send(topic, [record(1), Message(b"no")])
    _fails_once(monkeypatch)
    outcome = p.publish(p.run())
    assert outcome.status == "blocked"
    assert "50.00%" in outcome.reasons[0]
    assert not p.lake.catalog("main").table_exists((p.ingest.name, "a"))


def test_a_second_attempt_to_reprocess_dead_letters_is_judged_by_them_too(
    project: Opened, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one had marked was taken for done: no letter, no verdict."""
    topic = kafka.topic()
    p = project(two_tables(topic))
    kafka.send(topic, [record(1), Message(b"no")])
    assert p.publish(p.run()).published
    _fails_once(monkeypatch, "_iter_changed_assets")
    result = p.run(tags={RunTag.REPROCESS: DeadLetterSelection().to_tag()})
    told = [
        each.asset_check_evaluation_data.description
        for each in result.all_events
        if each.event_type_value == "ASSET_CHECK_EVALUATION"
    ]
    assert [one for one in told if one and one.endswith("reprocessed; 1 failed again.")]
    assert p.publish(result).published
    assert p.dead() == [b"no", b"no"]  # the first is marked, the second is why


def test_a_run_that_slept_while_another_published_is_refused(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic))
    kafka.send(topic, [record(1)])
    assert p.publish(p.run()).published
    kafka.send(topic, [record(2)])
    paused = p.run()
    kafka.send(topic, [record(3, "b")])
    assert p.publish(p.run()).published
    outcome = p.publish(paused)
    assert outcome.status == "refused"
    assert "another batch of this ingestion was published first" in outcome.reasons[0]
    assert (p.ids("a"), p.ids("b")) == ([1, 2], [3])


def test_the_sensor_waits_for_records_or_their_age(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic))
    clock = [1_000.0]
    sensor = build_batch_sensor(
        p.ingest, f"ingest_{p.ingest.name}_job", least_records=3, most_age_s=60, clock=lambda: clock[0]
    )
    cursor: str | None = None

    def tick() -> Any:
        nonlocal cursor
        resources = {"lakehouse": LakehouseResource.from_settings(p.lake.settings)}
        with dg.build_sensor_context(instance=p.instance, cursor=cursor, resources=resources) as context:
            told = sensor.evaluate_tick(context)
        cursor = told.cursor
        return told

    first = tick()
    assert first.skip_message == "No records are waiting."
    (lag,) = first.asset_events
    assert (lag.asset_key, lag.metadata["branchlake/lag"].value) == (topic_key(p.ingest, topic), 0)
    kafka.send(topic, [record(1), record(2)])
    assert tick().skip_message == "2 records waiting."
    clock[0] += 59
    assert not tick().run_requests
    clock[0] += 1
    (request,) = tick().run_requests
    assert request.tags[RunTag.INGESTION] == p.ingest.name
    kafka.send(topic, [record(3)])
    (request,) = tick().run_requests
    run = p.instance.create_run_for_job(
        p.definitions.resolve_job_def(f"ingest_{p.ingest.name}_job"), tags=dict(request.tags)
    )
    told = tick()
    assert told.skip_message == f"Run {run.run_id[:8]} is active."
    p.instance.report_run_failed(run)
    assert len(tick().run_requests) == 1


def test_the_sensor_starts_a_batch_when_no_further_record_arrives(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic))
    clock = [1_000.0]
    cursor: str | None = None
    sensor = build_batch_sensor(
        p.ingest, f"ingest_{p.ingest.name}_job", most_age_s=60, quiet_s=3, clock=lambda: clock[0]
    )

    def launches_after(seconds: float) -> int:
        nonlocal cursor
        clock[0] += seconds
        resources = {"lakehouse": LakehouseResource.from_settings(p.lake.settings)}
        with dg.build_sensor_context(instance=p.instance, cursor=cursor, resources=resources) as context:
            tick = sensor.evaluate_tick(context)
        cursor = tick.cursor
        return len(tick.run_requests or ())

    for number in range(3):
        kafka.send(topic, [record(number)])
        assert launches_after(5) == 0
    assert launches_after(2) == 0
    assert launches_after(1) == 1
    kafka.send(topic, [record(3)])
    assert launches_after(5) == 0
    # The clock is set back by ten minutes.
    assert launches_after(-600) == 0
    assert launches_after(3) == 1


def test_no_run_is_started_while_the_one_before_waits_for_its_publication(
    project: Opened, kafka: Broker
) -> None:
    """It would read the same records again, and be refused."""
    topic = kafka.topic()
    p = project(two_tables(topic))
    sensor = build_batch_sensor(p.ingest, f"ingest_{p.ingest.name}_job", least_records=1)

    def tick() -> Any:
        resources = {"lakehouse": LakehouseResource.from_settings(p.lake.settings)}
        with dg.build_sensor_context(instance=p.instance, resources=resources) as context:
            return sensor.evaluate_tick(context)

    kafka.send(topic, [record(1)])
    (request,) = tick().run_requests
    done = p.run(tags=request.tags)
    assert tick().skip_message == f"Run {done.run_id[:8]} must be published first."
    p.instance.add_run_tags(done.run_id, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})
    assert len(tick().run_requests) == 1  # nobody knows when somebody takes it up again
    p.instance.add_run_tags(done.run_id, {RunTag.NEXT_ATTEMPT: NO_VALUE})
    assert p.publish(done).published
    assert tick().skip_message == "No records are waiting."


def test_the_group_has_committed_what_a_published_run_has_read(project: Opened, kafka: Broker) -> None:
    """Lag tools see runs of one batch too, when they are on `main` and not before."""
    topic = kafka.topic()
    p = project(two_tables(topic))
    admin = AdminClient(kafka.cluster.client_options())

    def committed() -> int:
        observe_topics(p.ingest, p.lake, 0.0, 1_000.0)
        partitions = [TopicPartition(topic, 0)]
        asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(p.ingest.group, partitions)])
        (place,) = asked[p.ingest.group].result(30).topic_partitions
        return int(place.offset)

    kafka.send(topic, [record(1), record(2, "b")])
    result = p.run()
    before = committed()
    assert p.publish(result).published
    assert (before < 0, committed()) == (True, 2)


def test_the_live_sensor_keeps_one_run_going_and_reports_the_lag(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic()
    p = project(two_tables(topic))
    clock, cursor = [1_000.0], None
    sensor = live_sensor(p.ingest, clock=lambda: clock[0])

    def tick() -> tuple[int, list[Any]]:
        nonlocal cursor
        resources = {"lakehouse": LakehouseResource.from_settings(p.lake.settings)}
        with dg.build_sensor_context(instance=p.instance, cursor=cursor, resources=resources) as context:
            told = sensor.evaluate_tick(context)
        cursor = told.cursor
        return len(told.run_requests or ()), [
            one.metadata["branchlake/lag"].value for one in told.asset_events
        ]

    kafka.send(topic, [record(1), record(2)])
    assert tick() == (1, [2])
    run = p.instance.create_run_for_job(
        p.definitions.resolve_job_def(f"ingest_{p.ingest.name}_live"), tags={RunTag.INGESTION: p.ingest.name}
    )
    clock[0] += 59
    assert tick() == (0, [])
    kafka.send(topic, [record(3)])
    clock[0] += 1
    assert tick() == (0, [3])
    p.instance.report_run_failed(run)
    assert tick() == (1, [])


def test_a_run_starts_at_the_committed_offsets_and_its_second_attempt_too(
    project: Opened,
    kafka: Broker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, group = kafka.topic(partitions=2), a_group()
    send(kafka, topic, 5)
    send(kafka, topic, 3, partition=1)
    kafka.commit(group, topic, {0: 2, 1: 3})
    p = project(an_ingestion(topic, CommittedOffsets(group)))
    assert plan_batch_on_main(p.ingest, p.lake).plan.must_record
    _fails_once(monkeypatch)
    first, second = p.run(), p.run()
    assert p.publish(first).published
    assert p.publish(second).status in ("refused", "blocked")
    assert held(p.lake, p.ingest) == {0: [2, 3, 4]}
    kafka.commit(group, topic, {0: 0, 1: 0})
    send(kafka, topic, 1, partition=1)
    assert p.publish(p.run()).published
    assert held(p.lake, p.ingest) == {0: [2, 3, 4], 1: [3]}


def test_a_run_that_cannot_start_says_why_and_publishes_nothing(project: Opened, kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    p = project(an_ingestion(topic, StartingOffsets({topic: {0: 0}})))
    result = p.run(ok=False)
    (failure,) = [each for each in result.all_events if each.is_step_failure]
    error: Any = failure.step_failure_data.error
    assert error is not None
    assert "StartOffsetsMissing" in str(error)
    assert not p.lake.catalog("main").table_exists((p.ingest.name, "t"))
