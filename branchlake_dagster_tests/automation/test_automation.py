"""The automation conditions against Dagster's own evaluator; publications are told as the publisher does."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.publication import new_publications as reports
from branchlake_dagster.publication.conditions import (
    ABANDONED_AFTER,
    awaiting_verdict,
    never_evaluated,
    newly_published,
    on_publication,
    publication_automation_sensor,
)
from branchlake_dagster.publication.new_publications import (
    REREAD_EVENT_IDS,
    PublicationReport,
    ReportCursor,
    ReportReader,
)
from branchlake_dagster.runs.run_tags import PENDING, RunLocation, build_opening_tags
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import AssetDaemonCursor

UP, DOWN = dg.AssetKey("up"), dg.AssetKey("down")
DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-11")
HOURS = dg.HourlyPartitionsDefinition("2026-08-01-00:00", end_date="2026-08-11-00:00")
DAY_BEFORE_TOO = dg.TimeWindowPartitionMapping(start_offset=-1)


@dg.asset(name="up")
def plain_up() -> None: ...


@dg.asset(name="up", partitions_def=DAYS)
def daily_up() -> None: ...


@dg.asset(name="up", partitions_def=HOURS)
def hourly_up() -> None: ...


def downstream(
    *deps: Any,
    partitions: dg.PartitionsDefinition[Any] | None = None,
    condition: dg.AutomationCondition[Any] | None = None,
) -> dg.AssetsDefinition:
    @dg.asset(
        name="down",
        deps=deps or [UP],
        partitions_def=partitions,
        automation_condition=condition or on_publication(),
    )
    def down() -> None: ...

    return down


@dataclass
class World:
    """An instance, definitions and the evaluator's cursor between two ticks."""

    instance: dg.DagsterInstance
    assets: list[Any]
    cursor: AssetDaemonCursor | None = None
    told: int = field(default=0)

    def tick(self, *, at: datetime.datetime | None = None) -> set[str | None]:
        """Evaluate once; the partitions of `down` that are requested (None: all of it)."""
        result = dg.evaluate_automation_conditions(
            dg.Definitions(assets=self.assets),
            self.instance,
            dg.AssetSelection.all(),
            cursor=self.cursor,
            evaluation_time=at,
        )
        self.cursor = result.cursor
        return set(result.get_requested_partitions(DOWN))

    def materialise(self, *keys: dg.AssetKey, partition: str | None = None, **tags: str) -> str:
        assets = [a for a in self.assets if isinstance(a, dg.AssetsDefinition)]
        result = dg.materialize(
            assets,
            selection=list(keys) or [UP],
            instance=self.instance,
            partition_key=partition,
            tags={f".dagster/branchlake_{name}": value for name, value in tags.items()},
        )
        return result.run_id

    def started(self, key: dg.AssetKey) -> str:
        """A run that has not written anything yet."""
        job = dg.Definitions(assets=self.assets).resolve_implicit_global_asset_job_def()
        return self.instance.create_run_for_job(
            job.get_subset(asset_selection={key}),
            asset_selection=frozenset({key}),
            status=dg.DagsterRunStatus.STARTED,
        ).run_id

    def tell(
        self,
        partition: str | None = None,
        *,
        run: str | None = None,
        commit: str | None = None,
        key: dg.AssetKey = UP,
    ) -> tuple[str, str]:
        """What the publisher tells `up` of a run that was published."""
        self.told += 1
        run, commit = run or f"run{self.told}", commit or f"{self.told:064x}"
        self.observe(partition, key=key, run=run, publication=commit, verdict="passed")
        return run, commit

    def observe(
        self, partition: str | None = None, *, run: str, key: dg.AssetKey = UP, **metadata: str
    ) -> None:
        self.instance.report_runless_asset_event(
            dg.AssetObservation(
                key,
                partition=partition,
                metadata={
                    "branchlake/run": dg.MetadataValue.dagster_run(run),
                    "branchlake/branch": f"run-{run}",
                    **{f"branchlake/{name}": value for name, value in metadata.items()},
                },
            )
        )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def plain(instance: dg.DagsterInstance) -> World:
    world = World(instance, [plain_up, downstream()])
    assert world.tick() == set()
    return world


@pytest.fixture
def daily(instance: dg.DagsterInstance) -> World:
    world = World(instance, [daily_up, downstream(partitions=DAYS)])
    assert world.tick() == set()
    return world


# -- when it fires -------------------------------------------------------------------------------------


def test_a_publication_requests_once_and_a_materialisation_does_not(plain: World) -> None:
    run = plain.materialise()
    assert plain.tick() == set()
    plain.tell(run=run)
    assert plain.tick() == {None}
    assert plain.tick() == set()
    plain.tell()
    assert plain.tick() == {None}
    assert plain.tick() == set()


def test_what_was_published_before_the_first_evaluation_does_not_fire(instance: dg.DagsterInstance) -> None:
    world = World(instance, [plain_up, downstream()])
    world.tell()
    assert world.tick() == set()
    assert world.tick() == set()
    world.tell()
    assert world.tick() == {None}


@pytest.mark.parametrize("verdict", ["blocked", "passed", "failed"])
def test_a_run_that_was_not_published_does_not_fire(plain: World, verdict: str) -> None:
    """Blocked by a check, refused for a conflict although it had passed, discarded after a failure."""
    plain.materialise()
    plain.observe(run="r", verdict=verdict, reasons="- why")
    assert plain.tick() == set()


def test_an_observation_of_somebody_else_does_not_fire(plain: World) -> None:
    plain.instance.report_runless_asset_event(dg.AssetObservation(UP, metadata={"rows": 3}))
    assert plain.tick() == set()


def test_all_partitions_reported_between_two_evaluations_are_requested_once(daily: World) -> None:
    days = [f"2026-08-0{day}" for day in range(1, 7)]
    for day in days[:3]:
        daily.tell(day)
    run, commit = daily.tell(days[3])
    for day in days[4:]:
        daily.tell(day, run=run, commit=commit)
    assert daily.tick() == set(days)
    assert daily.tick() == set()


def test_more_partitions_than_a_page_of_events(instance: dg.DagsterInstance, monkeypatch: Any) -> None:
    monkeypatch.setattr(reports, "_PAGE", 7)
    world = World(instance, [hourly_up, downstream(partitions=HOURS)])
    world.tick()
    hours = HOURS.get_partition_keys()[:20]
    for hour in hours:
        world.tell(hour, run="one", commit="aa")
    assert world.tick() == set(hours)


def test_a_publication_reported_twice_fires_once(plain: World) -> None:
    """The publisher died before it noted that it had told, or two publishers raced."""
    run, commit = plain.tell()
    plain.tell(run=run, commit=commit)
    assert plain.tick() == {None}
    plain.tell(run=run, commit=commit)
    assert plain.tick() == set()


def test_two_runs_in_one_commit_are_two_publications(plain: World) -> None:
    _, commit = plain.tell()
    assert plain.tick() == {None}
    plain.tell(run="the other", commit=commit)
    assert plain.tick() == {None}


def test_a_publication_between_the_request_and_the_next_evaluation_is_not_lost(plain: World) -> None:
    plain.tell()
    assert plain.tick() == {None}
    plain.tell()
    assert plain.tick() == {None}
    assert plain.tick() == set()


def test_since_last_handled_would_lose_it(instance: dg.DagsterInstance) -> None:
    """Why `on_publication` does not use it; when Dagster mends it this test says so."""
    condition = dg.AutomationCondition.any_deps_match(newly_published()).since_last_handled()
    world = World(instance, [plain_up, downstream(condition=condition)])
    world.tick()
    world.tell()
    assert world.tick() == {None}
    world.tell()
    assert world.tick() == set()


def test_a_publisher_whose_clock_is_late_is_not_lost_either(plain: World) -> None:
    now = datetime.datetime.now(datetime.UTC)
    plain.tell()
    assert plain.tick(at=now + datetime.timedelta(hours=1)) == {None}
    plain.tell()
    assert plain.tick(at=now + datetime.timedelta(hours=1, seconds=30)) == {None}


def test_partitions_that_no_longer_exist_are_left_out(daily: World) -> None:
    daily.tell("1999-01-01")
    daily.tell("2026-08-03")
    daily.tell(None)
    assert daily.tick() == {"2026-08-03"}


# -- what holds it back --------------------------------------------------------------------------------


def test_it_waits_for_a_run_in_progress_and_then_requests_what_came_meanwhile(plain: World) -> None:
    run = plain.started(DOWN)
    plain.tell()
    assert plain.tick() == set()
    plain.tell()
    assert plain.tick() == set()
    plain.instance.report_run_canceled(plain.instance.get_run_by_id(run))
    assert plain.tick() == {None}
    assert plain.tick() == set()


def test_it_waits_for_the_verdict_on_its_own_partition(daily: World) -> None:
    """A second run of the partition would stand on a `main` without the first and be refused."""
    run = daily.materialise(DOWN, partition="2026-08-02", verdict=PENDING)
    daily.tell("2026-08-02")
    daily.tell("2026-08-03")
    assert daily.tick() == {"2026-08-03"}
    assert daily.tick() == set()
    daily.instance.add_run_tags(run, {RunTag.VERDICT: "passed"})
    assert daily.tick() == {"2026-08-02"}
    assert daily.tick() == set()


def test_it_waits_for_every_unjudged_run_of_the_partition(daily: World) -> None:
    first = daily.materialise(DOWN, partition="2026-08-02", verdict=PENDING)
    daily.materialise(DOWN, partition="2026-08-02", verdict="blocked")
    daily.materialise(DOWN, partition="2026-08-03")
    daily.tell("2026-08-02")
    assert daily.tick() == set()
    daily.instance.add_run_tags(first, {RunTag.VERDICT: "passed"})
    assert daily.tick() == {"2026-08-02"}


def test_a_run_that_nobody_will_judge_delays_nothing_forever(plain: World) -> None:
    plain.materialise(DOWN, verdict=PENDING)
    plain.tell()
    now = datetime.datetime.now(datetime.UTC)
    assert plain.tick(at=now + ABANDONED_AFTER / 2) == set()
    assert plain.tick(at=now + ABANDONED_AFTER * 2) == {None}


def test_a_run_of_something_else_does_not_hold_it_up(plain: World) -> None:
    plain.materialise(UP, verdict=PENDING)
    plain.tell()
    assert plain.tick() == {None}


# -- runs that wrote upstream and downstream -----------------------------------------------------------


def test_a_run_that_wrote_both_does_not_request_the_downstream_again(daily: World) -> None:
    run = daily.materialise(UP, DOWN, partition="2026-08-02")
    daily.tell("2026-08-02", run=run)
    assert daily.tick() == set()


@pytest.mark.parametrize("continues", [True, False])
def test_a_retry_brings_what_the_run_wrote_that_it_continues(daily: World, continues: bool) -> None:
    parent = daily.materialise(DOWN, partition="2026-08-02")
    retry = daily.materialise(UP, partition="2026-08-02")
    place = RunLocation(f"run-{retry}", "base", continues=f"run-{parent}" if continues else None)
    daily.instance.add_run_tags(retry, build_opening_tags(retry, place, {}))
    daily.tell("2026-08-02", run=retry)
    assert daily.tick() == (set() if continues else {"2026-08-02"})


def test_a_dependent_partition_that_the_run_did_not_write_is_requested(instance: dg.DagsterInstance) -> None:
    """The day after depends on this day too, and the run wrote only this one."""
    down = downstream(dg.AssetDep(UP, partition_mapping=DAY_BEFORE_TOO), partitions=DAYS)
    world = World(instance, [daily_up, down])
    world.tick()
    run = world.materialise(UP, DOWN, partition="2026-08-02")
    world.tell("2026-08-02", run=run)
    assert "2026-08-03" in world.tick()


# -- mappings and composition --------------------------------------------------------------------------


def test_hours_map_to_their_day(instance: dg.DagsterInstance) -> None:
    world = World(instance, [hourly_up, downstream(partitions=DAYS)])
    world.tick()
    world.tell("2026-08-02-05:00")
    world.tell("2026-08-02-06:00")
    world.tell("2026-08-04-00:00")
    assert world.tick() == {"2026-08-02", "2026-08-04"}


def test_partitions_of_an_unpartitioned_downstream_are_one_request(instance: dg.DagsterInstance) -> None:
    world = World(instance, [daily_up, downstream()])
    world.tick()
    world.tell("2026-08-02")
    world.tell("2026-08-03")
    assert world.tick() == {None}


def test_an_upstream_of_another_code_location(instance: dg.DagsterInstance) -> None:
    world = World(instance, [dg.AssetSpec(UP), downstream()])
    world.tick()
    world.tell()
    assert world.tick() == {None}


def test_any_of_two_upstreams_fires_and_ignore_leaves_one_out(instance: dg.DagsterInstance) -> None:
    other = dg.AssetSpec("other")
    both = on_publication()
    one = on_publication().ignore(dg.AssetSelection.assets("other"))
    for condition, wanted in ((both, {None}), (one, set())):
        world = World(instance, [plain_up, other, downstream(UP, "other", condition=condition)])
        world.tick()
        world.tell(key=dg.AssetKey("other"))
        assert world.tick() == wanted


C = dg.AutomationCondition


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (C.any_deps_match(newly_published()), [{None}, set()]),
        (C.all_deps_match(newly_published()), [{None}, set()]),
        (C.asset_matches(UP, newly_published()), [{None}, set()]),
        (C.any_deps_match(newly_published() & C.missing()), [{None}, set()]),
        (C.any_deps_match(newly_published() & ~C.missing()), [set(), set()]),
        (C.any_deps_match(newly_published() | C.newly_updated()), [{None}, set()]),
        (C.any_deps_match(newly_published()).newly_true(), [{None}, set()]),
        (C.any_deps_match(newly_published().since(C.newly_requested())), [{None}, {None}]),
        (~C.any_deps_match(newly_published()), [set(), {None}]),
        (on_publication() & ~C.any_deps_missing(), [set(), set()]),
        (on_publication() | C.newly_updated(), [{None}, set()]),
        (on_publication().replace("in_progress", C.missing()), [set(), set()]),
        (C.any_deps_match(newly_published()) & ~awaiting_verdict(), [{None}, set()]),
    ],
    ids=lambda value: value.get_label() or value.name if isinstance(value, C) else None,
)
def test_it_composes_with_dagsters_operators(
    instance: dg.DagsterInstance, condition: dg.AutomationCondition[Any], wanted: list[set[None]]
) -> None:
    world = World(instance, [plain_up, downstream(condition=condition)])
    world.tick()
    world.tell()
    assert [world.tick(), world.tick()] == wanted


def test_a_rewritten_condition_goes_on_where_the_old_one_stopped(plain: World) -> None:
    plain.tell()
    assert plain.tick() == {None}
    plain.tell()
    plain.assets = [
        plain_up,
        downstream(condition=C.any_deps_match(newly_published() | C.code_version_changed())),
    ]
    assert plain.tick() == {None}
    assert plain.tick() == set()


def test_a_check_may_follow_the_publication_of_its_asset(instance: dg.DagsterInstance) -> None:
    @dg.asset_check(asset=UP, automation_condition=on_publication())
    def on_main() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    defs = dg.Definitions(assets=[plain_up], asset_checks=[on_main])
    world = World(instance, [plain_up])
    first = dg.evaluate_automation_conditions(defs, instance, dg.AssetSelection.all())
    world.tell()
    again = dg.evaluate_automation_conditions(defs, instance, dg.AssetSelection.all(), cursor=first.cursor)
    assert again.total_requested == 1


def test_a_check_itself_is_not_published(instance: dg.DagsterInstance) -> None:
    @dg.asset_check(asset=UP, automation_condition=newly_published())
    def wrong() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    with pytest.raises(Exception) as raised:  # noqa: PT011 - Dagster raises a plain one
        dg.evaluate_automation_conditions(
            dg.Definitions(assets=[plain_up], asset_checks=[wrong]), instance, dg.AssetSelection.all()
        )
    assert isinstance(raised.value.__cause__, ConfigurationError)
    assert "any_deps_match(newly_published())" in str(raised.value.__cause__)


# -- the sensor ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Function `AssetSelection.keys` is deprecated:DeprecationWarning")
def test_the_sensor_evaluates_in_the_code_server(instance: dg.DagsterInstance) -> None:
    sensor = publication_automation_sensor()
    defs = dg.Definitions(assets=[daily_up, downstream(partitions=DAYS)], sensors=[sensor])
    repository = defs.get_repository_def()
    world = World(instance, [])

    def tick(cursor: str | None) -> dg.SensorResult:
        context = dg.build_sensor_context(instance, cursor=cursor, repository_def=repository)
        result = sensor.evaluate_tick(context)
        return dg.SensorResult(run_requests=list(result.run_requests or []), cursor=result.cursor)

    first = tick(None)
    world.tell("2026-08-02")
    second = tick(first.cursor)
    (request,) = second.run_requests or []
    assert (request.asset_selection, request.partition_key) == ([DOWN], "2026-08-02")
    world.tell("2026-08-03")
    world.tell("2026-08-04")
    third = tick(second.cursor)
    (backfill,) = third.run_requests or []
    assert backfill.asset_graph_subset is not None
    assert backfill.asset_graph_subset.num_partitions_and_non_partitioned_assets == 2
    assert tick(third.cursor).run_requests == []


def test_a_condition_that_no_sensor_evaluates_is_named() -> None:
    ours = downstream()
    eager = dg.AssetSpec("eager", automation_condition=dg.AutomationCondition.eager())
    daemons = dg.AutomationConditionSensorDefinition("daemons", target=dg.AssetSelection.all())

    def missed(*sensors: dg.SensorDefinition) -> list[Any]:
        defs = dg.Definitions(assets=[plain_up, ours, eager], sensors=list(sensors))
        return never_evaluated(defs.get_repository_def())

    assert missed() == [DOWN]
    assert missed(daemons) == [DOWN]
    assert missed(publication_automation_sensor(target=[UP])) == [DOWN]
    assert missed(publication_automation_sensor()) == []


def test_the_conditions_are_not_sent_to_the_daemon() -> None:
    """It could not import them: the whole code location would fail to load there."""
    assert not on_publication().is_serializable
    assert "published" in str(on_publication().get_snapshot())


def test_the_documents_examples_load() -> None:
    text = (Path(__file__).parents[2] / "docs" / "automation.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    for condition in ("complete", "only_prices", "daily"):
        world = World(dg.DagsterInstance.ephemeral(), [plain_up, downstream(condition=names[condition])])
        assert world.tick() == set()
    assert never_evaluated(names["defs"].get_repository_def()) == []


# -- reading what was told -----------------------------------------------------------------------------


def test_a_position_survives_as_text() -> None:
    position = ReportCursor(12, frozenset({("run-a@1", None), ("run-b@2", "x|y"), ("run-b@2", "x|z")}))
    assert ReportCursor.from_json(position.to_json()) == position


@pytest.mark.long
@settings(max_examples=40)
@given(
    delays=st.lists(st.integers(0, REREAD_EVENT_IDS - 1), min_size=1, max_size=30),
    gaps=st.lists(st.integers(1, 400), min_size=30, max_size=30),
    again=st.lists(st.booleans(), min_size=30, max_size=30),
    every=st.integers(1, 900),
)
def test_each_publication_is_passed_on_once_however_late_its_event_is_committed(
    delays: list[int], gaps: list[int], again: list[bool], every: int
) -> None:
    """Events become visible `delay` ids after their own; some publications are told again soon after."""
    events: list[tuple[int, int, str]] = []
    at = 0
    for number, delay in enumerate(delays):
        at += gaps[number]
        events.append((at, at + delay, f"p{number}"))
        if again[number]:
            events.append((at + 1, at + 1 + delay, f"p{number}"))
            at += 1
    now = 0

    def visible(_: Any, __: Any, *, after_id: int, last_id: int) -> Iterator[PublicationReport]:
        for storage_id, seen_from, name in sorted(events):
            if after_id < storage_id <= last_id and seen_from <= now:
                yield PublicationReport(storage_id, name, "c", None)

    passed_on: list[str] = []
    position: str | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "iter_publication_reports", visible)
        while now <= at + 2 * REREAD_EVENT_IDS:
            reader = ReportReader(None, UP, start_id=0, last_id=now)
            new = reader.read_since(position)
            position = new.cursor
            passed_on += [published.branch for published in new.publications]
            now += every
    assert sorted(passed_on) == sorted({name for _, _, name in events})
