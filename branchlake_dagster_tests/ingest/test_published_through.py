"""The condition that waits for a valid-through time, against Dagster's own evaluator, without a lake."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.published_through import (
    PublishedThrough,
    PublishedTime,
    parse_time,
    published_through,
)
from branchlake_dagster.ingest.published_through_check import published_through_check
from branchlake_dagster.publication.conditions import (
    awaiting_verdict,
    never_evaluated,
    publication_automation_sensor,
)
from branchlake_dagster_tests.dagster_internals import AssetDaemonCursor
from branchlake_dagster_tests.suite.raised import require

DAYS = dg.DailyPartitionsDefinition("2026-11-20", timezone="Europe/Vienna")
REGIONS = dg.MultiPartitionsDefinition({"day": DAYS, "region": dg.StaticPartitionsDefinition(["eu", "us"])})
NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
KEY = dg.AssetKey("revenue")


@dataclass
class Table:
    """What the lake says of the ingested table."""

    published: PublishedTime = PublishedTime(None, "nothing yet")  # noqa: RUF009 - frozen
    reads: int = 0

    def through(self, text: str) -> None:
        self.published = PublishedTime(datetime.fromisoformat(text), "")

    def read(self, _: PublishedThrough) -> PublishedTime:
        self.reads += 1
        return self.published


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    found = Table()
    monkeypatch.setattr(PublishedThrough, "_published", lambda condition, _: found.read(condition))
    return found


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


class Evaluated:
    """An asset with a condition, evaluated at `NOW`."""

    def __init__(
        self, instance: dg.DagsterInstance, condition: Any, partitions: dg.PartitionsDefinition[Any] | None
    ) -> None:
        @dg.asset(name="revenue", partitions_def=partitions, automation_condition=condition)
        def revenue(context) -> None:
            if context.run.tags.get("fails"):
                raise dg.Failure("refused", allow_retries=False)

        self._instance, self._asset = instance, revenue
        self._cursor: AssetDaemonCursor | None = None
        self.definitions = dg.Definitions(assets=[revenue], sensors=[publication_automation_sensor()])

    def tick(self) -> set[str | None]:
        result = dg.evaluate_automation_conditions(
            self.definitions,
            self._instance,
            dg.AssetSelection.all(),
            cursor=self._cursor,
            evaluation_time=NOW,
        )
        self._cursor = result.cursor
        return set(result.get_requested_partitions(KEY))

    def run(self, partition: str, **tags: str) -> None:
        dg.materialize(
            [self._asset],
            partition_key=partition,
            instance=self._instance,
            tags=tags,
            raise_on_error=False,
        )


def test_a_partition_is_true_once_the_table_is_published_through_its_end(
    table: Table, instance: dg.DagsterInstance
) -> None:
    """The end of a day in Vienna is 23:00 of the day before in UTC."""
    evaluated = Evaluated(instance, published_through("raw.orders"), DAYS)
    assert evaluated.tick() == set()
    table.through("2026-11-21T22:59:59.999Z")
    assert evaluated.tick() == {"2026-11-20"}
    table.through("2026-11-21T23:00Z")
    assert evaluated.tick() == {"2026-11-20", "2026-11-21"}


def test_late_records_are_waited_for(table: Table, instance: dg.DagsterInstance) -> None:
    condition = published_through("raw.orders", allowed_lateness=timedelta(minutes=15))
    evaluated = Evaluated(instance, condition, DAYS)
    table.through("2026-11-20T23:14:59Z")
    assert evaluated.tick() == set()
    table.through("2026-11-20T23:15Z")
    assert evaluated.tick() == {"2026-11-20"}


def test_of_several_dimensions_the_time_counts(table: Table, instance: dg.DagsterInstance) -> None:
    evaluated = Evaluated(instance, published_through("raw.orders"), REGIONS)
    table.through("2026-11-20T23:00Z")
    assert evaluated.tick() == {"2026-11-20|eu", "2026-11-20|us"}


@pytest.mark.parametrize("partitions", [None, DAYS])
def test_a_given_time_is_that_of_all_partitions(
    table: Table, instance: dg.DagsterInstance, partitions: Any
) -> None:
    condition = published_through("raw.orders", "2026-11-24T06:00Z", allowed_lateness=timedelta(hours=1))
    evaluated = Evaluated(instance, condition, partitions)
    table.through("2026-11-24T06:59:59Z")
    assert evaluated.tick() == set()
    table.through("2026-11-24T07:00Z")
    assert evaluated.tick() == ({None} if partitions is None else set(DAYS.get_partition_keys(NOW)))


def test_it_is_for_checks_too(table: Table, instance: dg.DagsterInstance) -> None:
    @dg.asset
    def revenue() -> None: ...

    @dg.asset_check(asset=revenue, automation_condition=published_through("raw.orders", "2026-11-24T06:00Z"))
    def complete() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    defs = dg.Definitions(assets=[revenue], asset_checks=[complete])
    for through, requested in (("2026-11-24T05:00Z", 0), ("2026-11-24T06:00Z", 1)):
        table.through(through)
        result = dg.evaluate_automation_conditions(defs, instance, dg.AssetSelection.all())
        assert result.total_requested == requested


def test_an_asset_that_has_no_partition_of_time_needs_a_time(
    table: Table, instance: dg.DagsterInstance
) -> None:
    table.through("2026-11-24T06:00Z")
    for partitions in (None, dg.StaticPartitionsDefinition(["a"])):
        with pytest.raises(Exception) as refused:  # noqa: PT011 - Dagster raises a plain one
            Evaluated(instance, published_through("raw.orders"), partitions).tick()
        require(refused.value.__cause__, ConfigurationError, "revenue", subject="revenue")


def test_the_documented_combination_requests_each_partition_once(
    table: Table, instance: dg.DagsterInstance
) -> None:
    condition = dg.AutomationCondition
    evaluated = Evaluated(
        instance,
        condition.in_latest_time_window(timedelta(days=3))
        & condition.missing()
        & ~condition.in_progress()
        & ~condition.execution_failed()
        & ~awaiting_verdict()
        & published_through("raw.orders"),
        DAYS,
    )
    table.through("2026-11-21T23:00Z")
    assert evaluated.tick() == {"2026-11-21"}
    evaluated.run("2026-11-21")
    assert evaluated.tick() == set()
    table.through("2026-11-23T23:00Z")
    assert evaluated.tick() == {"2026-11-22", "2026-11-23"}
    evaluated.run("2026-11-22", fails="yes")
    evaluated.run("2026-11-23")
    reads = table.reads
    assert evaluated.tick() == set()
    assert table.reads == reads, "no candidate is left, and the table is read all the same"


def test_a_table_that_nobody_ingests_is_reported(
    table: Table, instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
) -> None:
    table.published = PublishedTime(None, "No ingestion", ingested=False)
    assert Evaluated(instance, published_through("raw.ordres"), DAYS).tick() == set()
    assert [
        record
        for record in caplog.records
        if record.levelname == "WARNING" and "ordres" in record.getMessage()
    ]


def test_only_the_sensor_of_this_package_evaluates_it() -> None:
    @dg.asset(partitions_def=DAYS, automation_condition=published_through("raw.orders"))
    def revenue() -> None: ...

    assert never_evaluated(dg.Definitions(assets=[revenue]).get_repository_def()) == [revenue.key]
    with_sensor = dg.Definitions(assets=[revenue], sensors=[publication_automation_sensor()])
    assert never_evaluated(with_sensor.get_repository_def()) == []


@pytest.mark.parametrize("time", ["tomorrow", "2026-11-24T06:00", datetime(2026, 11, 24)])
def test_a_time_without_a_zone_is_refused(time: Any) -> None:
    for declare in (parse_time, lambda at: published_through("raw.orders", at)):
        with pytest.raises(ConfigurationError) as refused:
            declare(time)
        assert refused.value.hint is not None


@pytest.mark.parametrize("name", ["", "raw/", "raw/a@b"])
def test_a_name_that_no_table_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        published_through(name)
    with pytest.raises(ConfigurationError):
        published_through_check("revenue", name, "2026-11-24T06:00Z")


def test_a_check_without_a_time_is_for_an_asset_with_partitions_of_time() -> None:
    with pytest.raises(ConfigurationError):
        published_through_check("revenue", "raw.orders")
    check = published_through_check("revenue", "raw.orders", partitions_def=DAYS)
    (spec,) = check.check_specs
    assert spec.key == dg.AssetCheckKey(KEY, "published_through")
