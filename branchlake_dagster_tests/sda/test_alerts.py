"""Alerts: the log follows the risks, whatever changes come in whatever cuts, and each entry is made once."""

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame, SparkSession

from branchlake_dagster import table_metadata
from branchlake_dagster.incremental import spark_inputs
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.sda.alerts.corrections import (
    ALERT_FIELDS,
    ALERT_NAMESPACE,
    CANCELED,
    CORRECTED,
    ENTRY_COLUMNS,
    EXPECTED_AGAIN,
    HIGH,
    INSERT,
    LOW,
    MEDIUM,
    NEW,
    RETRACT,
    AlertRules,
    derive_entries,
    select_reportable,
    with_current_risks,
)
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS, conjunction_alerts
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.partitions import windows
from branchlake_dagster.sda.trust.assessment import NO_MODEL, TOO_SLOW
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite.soak import soaking

pytestmark = pytest.mark.spark

HOUR = datetime(2026, 8, 8, 3, tzinfo=UTC)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


def risk(first: int, second: int, minute: float, miss_km: float = 0.5, **other: Any) -> Row:
    """A risk of two objects, some minutes after `HOUR`."""
    tca = HOUR + timedelta(minutes=minute)
    return {
        "window_start": tca.replace(minute=0, second=0, microsecond=0),
        "risk_window_start": tca.replace(second=tca.second // 30 * 30, microsecond=0),
        "sat1_object_designator": first,
        "sat2_object_designator": second,
        "kind": "encounter",
        "tca": tca,
        "miss_distance_km": miss_km,
        "relative_speed_km_s": 11.123_456,
        "sat1_state_source": "element set",
        "sat2_state_source": "element set",
        "hard_body_radius_m": 10.0,
        "collision_probability": 2.34e-5,
        "max_collision_probability": 1e-4,
        "no_probability_because": None,
        **other,
    }


SCHEMA: dict[str, Any] = {
    name: pl.Datetime("us", "UTC")
    if isinstance(value, datetime)
    else pl.Float64
    if isinstance(value, float)
    else pl.Int64
    if isinstance(value, int)
    else pl.String
    for name, value in risk(1, 2, 0).items()
}


def frame(session: SparkSession, rows: list[Row], change: str | None = None) -> DataFrame:
    table = pl.DataFrame(rows, schema=SCHEMA)
    if change is not None:
        table = table.with_columns(pl.lit(change).alias("_change_type"))
    return spark_inputs.from_arrow(session, table.to_arrow())


class Log:
    """The log of alerts, extended by changes of the risks."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.risks: list[Row] = []
        self.entries = pl.DataFrame()

    def change(self, risks: list[Row], *, is_whole: bool = False) -> pl.DataFrame:
        """Replace the risks; return the new entries in their order."""
        removed = [] if is_whole else [one for one in self.risks if one not in risks]
        added = [one for one in risks if is_whole or one not in self.risks]
        self.risks = risks
        changed = frame(self.session, added, "INSERT").union(frame(self.session, removed, "DELETE"))
        reported = (
            spark_inputs.from_arrow(self.session, self.entries.to_arrow()) if self.entries.height else None
        )
        entries = derive_entries(select_reportable(changed, AlertRules()), reported, is_whole=is_whole)
        made = pl.DataFrame(entries.toArrow()).sort("alert_id", "sequence", "kind")
        assert tuple(made.columns) == ENTRY_COLUMNS
        self.entries = pl.concat([self.entries, made]) if self.entries.height else made
        return made

    def holding(self) -> pl.DataFrame:
        return holding_of(self.entries)


def holding_of(entries: pl.DataFrame) -> pl.DataFrame:
    """The alerts whose last entry is an insert."""
    last = entries.sort("alert_id", "sequence", "kind").group_by("alert_id", maintain_order=True)
    return last.last().filter(pl.col("kind") == INSERT)


def kinds(entries: pl.DataFrame) -> list[tuple[int, str, str]]:
    return entries.select("sequence", "kind", "reason").rows()


HISTORIES: dict[str, list[list[Row]]] = {
    "one approach": [[risk(5, 9, 10.0)], [risk(5, 9, 10.01, 0.7)], [], [risk(5, 9, 9.99)]],
    "below the rounding": [
        [risk(5, 9, 10.0, 0.5)],
        [risk(5, 9, 10.0, 0.501, relative_speed_km_s=11.123_4, collision_probability=2.31e-5)],
    ],
    "all kinds": [
        [
            risk(1, 2, 1, collision_probability=1e-4),
            risk(1, 3, 1, collision_probability=9.9e-5),
            risk(1, 4, 1, collision_probability=9.9e-6),
            risk(
                1,
                5,
                1,
                kind="together",
                collision_probability=None,
                no_probability_because="not an encounter",
            ),
            risk(1, 6, 1, 0.9, collision_probability=None, no_probability_because=NO_MODEL),
            risk(1, 7, 1, 1.1, collision_probability=None, no_probability_because=NO_MODEL),
            risk(1, 8, 1, 0.1, collision_probability=None, no_probability_because=TOO_SLOW),
        ]
    ],
    "two approaches": [
        [risk(5, 9, 4.0), risk(5, 9, 51.0)],
        [risk(5, 9, 4.0), risk(5, 9, 50.9, 0.4)],
    ],
    # First the removal is published, then, by the run of another hour, the risk.
    "end of the hour": [[risk(5, 9, 59.999)], [risk(5, 9, 60.001)], [], [risk(5, 9, 59.99)]],
    "within ten minutes": [
        [
            risk(5, 9, 2.0, 0.8),
            risk(5, 9, 6.0, 0.3),
            risk(7, 8, 2.0, 0.30, collision_probability=2e-5),
            risk(7, 8, 6.0, 0.31, collision_probability=3e-4),
            risk(7, 9, 2.0, 0.9, collision_probability=2e-5),
            risk(7, 9, 6.0, 0.1, collision_probability=None, no_probability_because="no error model"),
        ]
    ],
    "another pair": [
        [risk(5, 9, 2.0, 0.8), risk(5, 9, 6.0, 0.3)],
        [risk(5, 9, 2.0, 0.8), risk(5, 9, 6.0, 0.3), risk(5, 8, 6.0)],
    ],
}
"""Successive risks. Each history has objects of its own in the one log of `told`, so that Spark computes them together."""
OBJECTS = [f"sat{k}_object_designator" for k in (1, 2)]


@pytest.fixture(scope="module")
def told(session: SparkSession) -> dict[str, list[pl.DataFrame]]:
    """The entries of each history after each of its steps, with its own numbers of objects."""
    log, found = Log(session), {name: [] for name in HISTORIES}
    for step in range(max(map(len, HISTORIES.values()))):
        risks: list[Row] = []
        for number, history in enumerate(HISTORIES.values()):
            now = history[min(step, len(history) - 1)]
            risks += [one | {name: one[name] + 100 * number for name in OBJECTS} for one in now]
        made = log.change(risks)
        for number, (name, history) in enumerate(HISTORIES.items()):
            mine = made.filter(pl.col(OBJECTS[0]) // 100 == number)
            if step < len(history):
                found[name].append(mine.with_columns(pl.col(OBJECTS) % 100))
            else:
                assert mine.is_empty(), "nothing has changed"
    return found


def test_an_alert_is_inserted_corrected_canceled_and_expected_again(told):
    first, corrected, canceled, again = told["one approach"]
    assert kinds(first) == [(0, INSERT, NEW)]
    number = int(HOUR.timestamp() + 600) // 600
    assert first["alert_id"].to_list() == [str(uuid.uuid5(ALERT_NAMESPACE, f"5|9|{number}"))]
    assert kinds(corrected) == [(0, RETRACT, CORRECTED), (1, INSERT, CORRECTED)]
    retract, insert = corrected.rows(named=True)
    assert [retract[name] for name in ALERT_FIELDS] == [
        first.row(0, named=True)[name] for name in ALERT_FIELDS
    ]
    assert insert["miss_distance_km"] == 0.7
    assert kinds(canceled) == [(1, RETRACT, CANCELED)]
    assert kinds(again) == [(2, INSERT, EXPECTED_AGAIN)]
    assert pl.concat(told["one approach"])["alert_id"].n_unique() == 1


def test_a_risk_that_differs_only_below_the_rounding_is_no_correction(told):
    first, same = told["below the rounding"]
    assert kinds(first) == [(0, INSERT, NEW)]
    assert same.is_empty()


def test_which_risks_are_reported_and_how_urgent_they_are(told):
    (entries,) = told["all kinds"]
    assert dict(entries.select("sat2_object_designator", "priority").rows()) == {2: HIGH, 3: MEDIUM, 6: LOW}


def test_two_approaches_of_a_pair_have_alerts_of_their_own(told):
    first, moved = told["two approaches"]
    assert first["alert_id"].n_unique() == 2
    assert kinds(moved) == [(0, RETRACT, CORRECTED), (1, INSERT, CORRECTED)]
    holding = holding_of(pl.concat(told["two approaches"]))
    assert holding["miss_distance_km"].sort().to_list() == [0.4, 0.5]


def test_an_alert_keeps_its_id_over_the_end_of_an_hour_and_of_its_ten_minutes(told):
    first, moved, _, again = told["end of the hour"]
    assert moved["alert_id"].unique().to_list() == first["alert_id"].to_list()
    assert moved["window_start"].to_list() == [HOUR, HOUR + timedelta(hours=1)]
    assert again["alert_id"].to_list() == first["alert_id"].to_list()


def test_two_risks_within_ten_minutes_are_one_alert_of_the_most_severe(told):
    (made,) = told["within ten minutes"]
    made = made.sort(OBJECTS)
    assert made["miss_distance_km"].to_list() == [0.3, 0.31, 0.9]
    assert made["priority"].to_list() == ["medium", "high", "medium"]
    assert [one.height for one in told["another pair"]] == [1, 1]


def test_an_alert_holds_while_another_hour_has_a_risk_of_the_same_approach(session):
    log = Log(session)
    before, after = risk(5, 9, 59.999, 0.3), risk(5, 9, 60.002, 0.4)
    log.change([before, after])
    changed = with_current_risks(
        frame(session, [before], "DELETE"), frame(session, [after, risk(5, 8, 60.0)])
    )
    reported = spark_inputs.from_arrow(session, log.entries.to_arrow())
    entries = pl.DataFrame(derive_entries(select_reportable(changed, AlertRules()), reported).toArrow())
    assert sorted(kinds(entries)) == [(0, RETRACT, CORRECTED), (1, INSERT, CORRECTED)]
    assert entries.filter(pl.col("kind") == INSERT)["miss_distance_km"].to_list() == [0.4]


def test_a_removed_risk_that_other_rules_had_reported_cancels_its_alert(session):
    log = Log(session)
    log.change([risk(5, 9, 10.0)])
    removed = frame(session, [risk(5, 9, 10.0)], "DELETE")
    reported = spark_inputs.from_arrow(session, log.entries.to_arrow())
    strict = AlertRules(min_probability=1e-3)
    entries = pl.DataFrame(derive_entries(select_reportable(removed, strict), reported).toArrow())
    assert kinds(entries) == [(0, RETRACT, CANCELED)]


def test_all_risks_at_once_cancel_what_they_do_not_have(session):
    log = Log(session)
    log.change([risk(5, 9, 2.0), risk(6, 9, 30.0)])
    again = log.change([risk(5, 9, 2.0)], is_whole=True)
    assert kinds(again) == [(0, RETRACT, CANCELED)]
    assert again["sat1_object_designator"].to_list() == [6]


def test_after_any_history_the_alerts_that_hold_are_those_of_the_risks(session):
    seed = 20261126
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    random_numbers = random.Random(seed)
    log = Log(session)
    pairs = [(1, 2), (1, 3), (2, 3), (40, 41)]
    for _ in range(12 if soaking() else 6):
        risks = [
            risk(*pair, minute + random_numbers.choice([0.0, 0.01, -0.02]), random_numbers.choice([0.2, 0.6]))
            for pair in pairs
            for minute in (9.999, 55.0)
            if random_numbers.random() < 0.7
        ]
        log.change(risks)
        expected = frame(session, risks, "INSERT")
        wanted = pl.DataFrame(select_reportable(expected, AlertRules()).select(*ALERT_FIELDS).toArrow())
        by = ["sat1_object_designator", "sat2_object_designator", "tca"]
        assert log.holding().select(ALERT_FIELDS).sort(by).equals(wanted.sort(by))
    for _, entries in log.entries.sort("alert_id", "sequence", "kind").group_by("alert_id"):
        numbers = entries.select("sequence", "kind").rows()
        assert numbers == [(k // 2, (INSERT, RETRACT)[k % 2]) for k in range(len(numbers))]


# -- on the lake ---------------------------------------------------------------------------------------


@pytest.fixture
def empty_lake(lakehouse):
    def clear() -> None:
        catalog = lakehouse.catalog(MAIN)
        if catalog.namespace_exists("sda"):
            for name in catalog.list_tables("sda"):
                catalog.drop_table(name)

    clear()
    yield lakehouse
    clear()


class Risks:
    """The table of risks, whose hours a test sets."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

        @dg.asset(
            key=CONJUNCTION_RISKS,
            partitions_def=windows,
            metadata=table_metadata(partition_by="window_start", require_checks=False),
        )
        def conjunction_risks() -> pl.DataFrame:
            return pl.DataFrame(self.rows, schema=SCHEMA)

        self.asset = conjunction_risks

    def publish(self, p: Project, *rows: Row, hour: datetime = HOUR) -> None:
        self.rows = list(rows)
        assert p.settle(p.run(CONJUNCTION_RISKS, partition=hour.strftime(windows.fmt))).publication


CHECKS = [
    check for check in fusion_checks if {key.asset_key for key in check.check_keys} == {CONJUNCTION_ALERTS}
]


def alerts(p: Project) -> pl.DataFrame:
    table = p.lake.catalog(MAIN).load_table(tuple(CONJUNCTION_ALERTS.path))
    return pl.DataFrame(table.scan().to_arrow()).sort("alert_id", "sequence", "kind")


def test_each_change_of_the_risks_is_reported_once(empty_lake):
    risks = Risks()
    with project(empty_lake, risks.asset, conjunction_alerts, *CHECKS) as p:
        risks.publish(p, risk(5, 9, 10.0), risk(6, 9, 20.0, collision_probability=3e-9))
        assert p.settle(p.run(CONJUNCTION_ALERTS)).publication
        assert kinds(alerts(p)) == [(0, INSERT, NEW)]
        # The hour is computed again with the same result, and another hour is added.
        risks.publish(p, risk(5, 9, 10.0), risk(6, 9, 20.0, collision_probability=4e-9))
        risks.publish(p, risk(7, 9, 70.0), hour=HOUR + timedelta(hours=1))
        p.settle(p.run(CONJUNCTION_ALERTS))
        assert sorted(alerts(p)["sat1_object_designator"]) == [5, 7]
        # A run without a change reports nothing.
        p.settle(p.run(CONJUNCTION_ALERTS))
        assert alerts(p).height == 2
        # A correction, and a run for it that is refused because another one was faster.
        risks.publish(p, risk(5, 9, 10.1, 0.4))
        slow, fast = p.run(CONJUNCTION_ALERTS), p.run(CONJUNCTION_ALERTS)
        assert p.settle(fast).publication
        assert not p.settle(slow).publication
        entries = alerts(p).filter(pl.col("sat1_object_designator") == 5)
        assert kinds(entries) == [(0, INSERT, NEW), (0, RETRACT, CORRECTED), (1, INSERT, CORRECTED)]
        # A rebuild of the whole table keeps the log.
        before = alerts(p)
        p.settle(p.run(CONJUNCTION_ALERTS, tags={RunTag.REBUILD: "Yes"}))
        assert alerts(p).equals(before)
