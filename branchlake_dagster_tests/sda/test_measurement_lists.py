"""`branchlake sda observations` and `branchlake sda tracks`: filters, and the files that they read."""

# No `from __future__ import annotations`: Dagster reads the annotations.
import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner, Result

from branchlake_dagster import table_metadata
from branchlake_dagster.cli.main import main
from branchlake_dagster.cli.option_types import Moment
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.commands.alert_list import all_of
from branchlake_dagster.sda.commands.measurement_list import (
    ASSOCIATION_TABLE,
    OBSERVATION_TABLE,
    TRACK_TABLE,
    ColumnNotThere,
    MeasurementFilter,
    find_newest_hour,
    read_tracks,
    with_position_sigma,
)
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite.raised import raising

NOON = datetime(2026, 8, 11, 12, tzinfo=UTC)
TIME = pl.Datetime("us", "UTC")
OBSERVATIONS: dict[str, Any] = {
    "observation_id": pl.String,
    "window_start": TIME,
    "source_kind": pl.String,
    "source_id": pl.String,
    "sensor_timestamp": TIME,
    "sat_no": pl.Int64,
    "track_id": pl.String,
}
ASSOCIATIONS: dict[str, Any] = {
    **{name: OBSERVATIONS[name] for name in ("observation_id", "window_start", "source_kind", "source_id")},
    "sensor_timestamp": TIME,
    "claimed_sat_no": pl.Int64,
    "sat_no": pl.Int64,
    "result": pl.String,
    "reason": pl.String,
    "normalized_distance": pl.Float64,
    "candidates": pl.Int64,
}
TRACKS: dict[str, Any] = {
    "window_start": TIME,
    "sat_no": pl.Int64,
    "epoch": TIME,
    **dict.fromkeys(("cx_x", "cy_y", "cz_z", "chi2_per_dof", "position_sigma_km"), pl.Float64),
    "n_radar": pl.Int64,
    "n_optical": pl.Int64,
}


def observation(name: str, minutes: float, sat_no: int | None, kind: str = "radar") -> dict[str, Any]:
    at = NOON + timedelta(minutes=minutes)
    return {
        "observation_id": name,
        "window_start": at.replace(minute=0),
        "source_kind": kind,
        "source_id": f"{kind}-1",
        "sensor_timestamp": at,
        "sat_no": sat_no,
        "track_id": None,
    }


def association(of: dict[str, Any], sat_no: int | None, result: str) -> dict[str, Any]:
    return {
        **{name: of[name] for name in ("observation_id", "window_start", "source_kind", "source_id")},
        "sensor_timestamp": of["sensor_timestamp"],
        "claimed_sat_no": of["sat_no"],
        "sat_no": sat_no,
        "result": result,
        "reason": "ambiguous" if result == "uncorrelated" else None,
        "normalized_distance": 1.5,
        "candidates": 2,
    }


def publish(lake: Lakehouse, table: str, rows: list[dict[str, Any]], schema: dict[str, Any]) -> None:
    @dg.asset(
        key=dg.AssetKey(table.split(".")),
        metadata=table_metadata(write_mode="append", layout=["hour(window_start)"], require_checks=False),
    )
    def measured() -> pl.DataFrame:
        return pl.DataFrame(rows, schema=schema)

    with project(lake, measured) as p:
        p.settle(p.run(measured.key))


@pytest.fixture
def run(
    lakehouse: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    drop_tables(lakehouse)

    def invoke(*options: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["sda", *options])
        assert result.exit_code == code, result.output
        return result

    yield invoke
    drop_tables(lakehouse)


def drop_tables(lakehouse: Lakehouse) -> None:
    catalog = lakehouse.catalog()
    for table in (OBSERVATION_TABLE, ASSOCIATION_TABLE, TRACK_TABLE):
        if catalog.table_exists(tuple(table.split("."))):
            catalog.drop_table(tuple(table.split(".")))


def names(result: Result, column: str = "observation_id") -> list[Any]:
    return [one[column] for one in json.loads(result.stdout)]


def test_observations_with_their_objects(lakehouse: Lakehouse, run: Callable[..., Result]) -> None:
    assert names(run("observations", "--json")) == []  # there is no table
    right, wrong, lost = observation("right", 1, 5), observation("wrong", 2, 5), observation("lost", 3, 5)
    found, none = observation("found", 4, None, "optical"), observation("none", 59, None, "optical")
    late, earlier = observation("late", 5, 5), observation("earlier", -30, 5)
    publish(lakehouse, OBSERVATION_TABLE, [earlier], OBSERVATIONS)
    publish(lakehouse, OBSERVATION_TABLE, [none, right, wrong, lost, found, late], OBSERVATIONS)
    hour = ["right", "wrong", "lost", "found", "late", "none"]
    # Without associations the claims count; without times the newest hour.
    assert names(run("observations", "--json")) == hour
    assert names(run("observations", "--json", "--object", "5")) == ["right", "wrong", "lost", "late"]
    assert names(run("observations", "--json", "--uncorrelated")) == []
    associated = [
        association(right, 5, "confirmed"),
        association(wrong, 6, "reassigned"),
        association(lost, None, "uncorrelated"),
        association(found, 5, "reassigned"),
        association(none, None, "uncorrelated"),
        association(earlier, 5, "confirmed"),
    ]
    publish(lakehouse, ASSOCIATION_TABLE, associated, ASSOCIATIONS)
    assert names(run("observations", "--json")) == hour
    assert names(run("observations", "--json", "--object", "5")) == ["right", "found", "late"]
    assert names(run("observations", "--json", "--object", "6")) == ["wrong"]
    assert names(run("observations", "--json", "--object", "7")) == []
    since = ("--since", "2026-08-11T11:00")
    assert names(run("observations", "--json", "--object", "5", *since)) == [
        "earlier",
        "right",
        "found",
        "late",
    ]
    assert names(run("observations", "--json", *since, "--until", "2026-08-11T12:00")) == ["earlier"]
    assert names(run("observations", "--json", "--since", "2026-08-11T12:04:30")) == ["late", "none"]
    assert names(run("observations", "--json", "--kind", "optical")) == ["found", "none"]
    assert names(run("observations", "--json", "--sensor", "radar-1", "--limit", "2")) == ["right", "wrong"]
    uncorrelated = json.loads(run("observations", "--json", "--uncorrelated").stdout)
    assert [
        (one["observation_id"], one["association_reason"], one["candidates"]) for one in uncorrelated
    ] == [
        ("lost", "ambiguous", 2),
        ("none", "ambiguous", 2),
    ]
    assert names(run("observations", "--json", "--uncorrelated", "--object", "5")) == ["lost"]
    assert names(run("observations", "--json", "--uncorrelated", "--object", "6")) == []
    rows = list(csv.DictReader(io.StringIO(run("observations", "--csv", "--object", "6").stdout)))
    assert [(row["sat_no"], row["associated_sat_no"], row["association_result"]) for row in rows] == [
        ("5", "6", "reassigned")
    ]
    assert [name for name in hour if name in run("observations").stdout] == hour
    run("observations", "--csv", "--json", code=2)


def test_texts_and_numbers_of_records_cannot_break_the_output(
    lakehouse: Lakehouse, run: Callable[..., Result]
) -> None:
    hostile = {**observation("a", 1, 5), "source_id": "radar\x1b[2J\nx"}
    associated = {**association(hostile, 5, "confirmed"), "normalized_distance": float("nan")}
    publish(lakehouse, OBSERVATION_TABLE, [hostile], OBSERVATIONS)
    publish(lakehouse, ASSOCIATION_TABLE, [associated], ASSOCIATIONS)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (row,) = json.loads(run("observations", "--json").stdout, parse_constant=refuse)
    assert (row["source_id"], row["normalized_distance"]) == (hostile["source_id"], None)
    shown = run("observations").stdout
    assert "\x1b" not in shown
    assert shown.count("\n") == 3
    run("observations", "--object", str(10**20), code=2)
    run("tracks", "--object", "-1", code=2)


def test_tracks(lakehouse: Lakehouse, run: Callable[..., Result]) -> None:
    assert names(run("tracks", "--json")) == []

    def track(sat_no: int, hour: int, radar: int = 3, optical: int = 0) -> dict[str, Any]:
        start = NOON + timedelta(hours=hour)
        return {
            "window_start": start,
            "sat_no": sat_no,
            "epoch": start + timedelta(minutes=30),
            "cx_x": 4.0,
            "cy_y": 4.0,
            "cz_z": 1.0,
            "chi2_per_dof": 9.0,
            "position_sigma_km": 9.0,
            "n_radar": radar,
            "n_optical": optical,
        }

    publish(lakehouse, TRACK_TABLE, [track(5, 0), track(6, 0, 0, 4), track(5, -1), track(6, -30)], TRACKS)
    assert names(run("tracks", "--json"), "sat_no") == [5, 6]
    assert names(run("tracks", "--json"), "position_sigma_km") == [9.0, 9.0]
    hours = ("--since", "2026-08-11T11:00", "--until", "2026-08-11T13:00")
    assert names(run("tracks", "--json", *hours), "sat_no") == [5, 5, 6]
    assert names(run("tracks", "--json", *hours, "--object", "5"), "epoch") == [
        "2026-08-11T11:30:00.000000Z",
        "2026-08-11T12:30:00.000000Z",
    ]
    assert names(run("tracks", "--json", "--kind", "optical"), "sat_no") == [6]
    assert names(run("tracks", "--json", "--limit", "1"), "sat_no") == [5]
    assert "9.000" in run("tracks").stdout
    assert len(run("tracks", "--csv", *hours).stdout.splitlines()) == 4
    reader = LakeReader(lakehouse)
    for column, options in (
        ("is_preferred", {"wanted": MeasurementFilter(), "only_preferred": True}),
        ("n_isl", {"wanted": MeasurementFilter(source_kinds=("isl",))}),
    ):
        with raising(ColumnNotThere, table=TRACK_TABLE, subject=column):
            read_tracks(reader, **options)
    # The first run with the column adds it; earlier rows have null in it.
    rows = [{**track(7, 1), "is_preferred": True}, {**track(8, 1), "is_preferred": False}]
    publish(lakehouse, TRACK_TABLE, rows, {**TRACKS, "is_preferred": pl.Boolean})
    assert names(run("tracks", "--json", "--since", "2026-08-11"), "sat_no") == [5, 5, 6, 7, 8]
    assert names(run("tracks", "--json", "--since", "2026-08-11", "--preferred"), "sat_no") == [7]


def test_only_the_hours_are_read(lakehouse: Lakehouse, run: Callable[..., Result]) -> None:
    publish(lakehouse, OBSERVATION_TABLE, [], OBSERVATIONS)
    empty = lakehouse.catalog().load_table(tuple(OBSERVATION_TABLE.split(".")))
    assert find_newest_hour(empty) is None
    assert MeasurementFilter().with_times(empty) == MeasurementFilter()
    assert names(run("observations", "--json")) == []
    every = [observation(f"o{hour}", 60 * hour, 1) for hour in range(5)]
    publish(lakehouse, OBSERVATION_TABLE, every, OBSERVATIONS)
    table = lakehouse.catalog().load_table(tuple(OBSERVATION_TABLE.split(".")))
    assert find_newest_hour(table) == NOON + timedelta(hours=4)

    def files(**times: datetime) -> int:
        parts = MeasurementFilter(**times).with_times(table).time_filter("sensor_timestamp")
        return len(list(table.scan(row_filter=all_of(parts)).plan_files()))

    assert files() == 1
    assert files(since=NOON + timedelta(hours=3)) == 2
    assert files(since=NOON + timedelta(hours=1), until=NOON + timedelta(hours=3)) == 2


@pytest.mark.parametrize(("chi2_per_dof", "expected"), [(9.0, 9.0), (0.25, 3.0)])
def test_tracks_without_their_uncertainty_get_that_of_the_table(chi2_per_dof: float, expected: float) -> None:
    tracks = pl.DataFrame({"cx_x": [4.0], "cy_y": [4.0], "cz_z": [1.0], "chi2_per_dof": [chi2_per_dof]})
    assert with_position_sigma(tracks)["position_sigma_km"].to_list() == [expected]


def test_times_of_the_options_are_in_utc(run: Callable[..., Result]) -> None:
    moment = Moment().convert("2026-08-11T12:00+02:00", None, None)
    assert (moment, moment.tzinfo) == (NOON - timedelta(hours=2), UTC)
    for value in ("0001-01-01T00:30", "2262-01-01", "soon"):
        run("tracks", "--since", value, code=2)
    run("tracks", "--since", "2026-08-11T12:00+01:00:30")


@pytest.mark.parametrize("command", ["tracks", "observations", "alerts", "conjunctions", "screen-ephemeris"])
def test_an_interval_that_ends_before_it_begins_is_refused(run: Callable[..., Result], command: str) -> None:
    interval = [["--since", "2026-08-11T12:00"], ["--until", "2026-08-11T13:00+02:00"]]
    for first, second in (interval, interval[::-1]):
        assert first[0] in run(command, *first, *second, code=2).output
