"""The benchmark of tracks: its counts against a case made by hand, and real element sets."""

import json
import math

import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.sda.benchmarks import association, tracks
from branchlake_dagster.sda.benchmarks.tracks import build_errors, count_tracks, measure_tracks
from branchlake_dagster_tests.sda.association.test_association_bench import read_each_nth_object
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS
from branchlake_dagster_tests.suite.json_contract import check_output
from branchlake_dagster_tests.suite.soak import soaking

NAMES = (
    *("0731T0348", "0805T0330", "0808T0220", "0808T1311"),
    *("0809T0227", "0809T1314", "0810T0803", "0811T0735"),
)
OBJECT_STEP, HOURS = (1, 1.0) if soaking() else (16, 0.5)
"""The real catalog is thinned out to each n-th object."""


def states(rows: list[tuple[int, float]]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=["sat_no", "x_km"], orient="row")
    return frame.with_columns(y_km=pl.lit(0.0), z_km=pl.lit(0.0))


def test_errors_are_counted_against_the_truth():
    truth = states([(1, 10.0), (2, 20.0)])
    element_sets = states([(1, 13.0), (2, 20.1), (3, 0.0)])
    fused = states([(1, 10.1), (2, 20.3), (3, 0.0)]).with_columns(is_preferred=pl.Series([True, True, False]))
    radar = states([(1, 10.4), (2, 20.3)]).with_columns(position_sigma_km=pl.lit(0.2))
    optical = states([(1, 10.2)]).with_columns(position_sigma_km=pl.lit(0.1))
    errors = build_errors(
        fused, [radar, optical], [optical.with_columns(x_km=pl.lit(11.0))], element_sets, truth
    )
    first, second, third = errors.sort("sat_no").iter_rows(named=True)
    assert (first["kinds"], second["kinds"], third["kinds"]) == (2, 1, 0)
    assert first["error_m"] == pytest.approx(100)
    assert first["best_sensor_error_m"] == pytest.approx(200)
    assert first["sensor_alone_error_m"] == pytest.approx(1000)
    assert second["sensor_alone_error_m"] is None
    assert first["element_set_error_m"] == pytest.approx(3000)
    assert math.isinf(third["error_m"])
    figures = count_tracks(errors)
    assert (figures["tracks"], figures["preferred_tracks"]) == (3, 2)
    assert figures["preferred_better_share"] == 0.5
    assert (figures["several_kinds_tracks"], figures["several_kinds_better_than_sensor_share"]) == (1, 1.0)
    assert (figures["alone_tracks"], figures["alone_better_than_sensor_share"]) == (1, 1.0)
    assert figures["median_error_m"] == pytest.approx(200)


def test_the_command_prints_its_figures(monkeypatch):
    monkeypatch.setattr(tracks, "_OBJECTS", 200)
    done = CliRunner().invoke(main, ["bench", "tracks", "--hours", "0.25", "--json"])
    assert done.exit_code == 0
    check_output(["bench", "tracks", "--json"], done.stdout)
    figures = json.loads(done.stdout)
    assert figures["tracks"] > 20
    assert figures["median_error_m"] < figures["element_set_error_m"]
    monkeypatch.setattr(tracks, "measure_tracks", lambda *_, **__: figures)
    assert CliRunner().invoke(main, ["bench", "tracks", "--hours", "0.25"]).exit_code == 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_refuses_too_few_files(tmp_path, count):
    paths = [tmp_path / f"{k}.tle" for k in range(count)]
    for path in paths:
        path.write_text("")
    assert CliRunner().invoke(main, ["bench", "tracks", *map(str, paths)]).exit_code == 2


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_preferred_tracks_are_better_than_real_element_sets(monkeypatch):
    """The specification: at least 95 % of the preferred tracks are better than their element set."""
    monkeypatch.setattr(association, "read_catalogue", read_each_nth_object(OBJECT_STEP))
    files = [SNAPSHOTS / f"active-2026{name}Z.tle.gz" for name in NAMES]
    found = measure_tracks(files, hours=HOURS, seed=77, say=lambda _: None)
    assert found["objects"] > 16_000 // OBJECT_STEP
    assert found["several_kinds_tracks"] > 50
    assert found["preferred_better_share"] >= 0.95
    assert found["preferred_share"] > 0.5
    assert found["median_error_m"] < found["best_sensor_error_m"] < found["element_set_error_m"]
    assert found["several_kinds_error_m"] < found["several_kinds_best_sensor_error_m"]
