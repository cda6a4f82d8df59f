"""The benchmark of associations: its counts against a case made by hand, and real element sets."""

import json
from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.sda.benchmarks import association
from branchlake_dagster.sda.benchmarks.association import count_outcomes, measure_association
from branchlake_dagster.sda.benchmarks.association_scene import CLUTTER, Scene, simulate_scene
from branchlake_dagster.sda.gp.read import ParsedCatalogue, read_catalogue
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS
from branchlake_dagster_tests.suite.json_contract import check_output
from branchlake_dagster_tests.suite.soak import soaking

OBJECT_STEP = 1 if soaking() else 4
"""The real catalog is thinned out to each n-th object."""


def read_each_nth_object(step: int) -> Callable[[bytes, str], ParsedCatalogue]:
    """As `read_catalogue`, for a benchmark of real element sets that shall take less time."""

    def read_some(content: bytes, source: str) -> ParsedCatalogue:
        parsed = read_catalogue(content, source)
        return replace(parsed, elements=parsed.elements.filter(pl.col("sat_no") % step == 0))

    return read_some


def test_outcomes_are_counted_by_their_cause():
    rows = [
        # id, true, associated, result, reason, wrong tag
        ("a", 1, 1, "confirmed", None, False),
        ("b", 1, 2, "reassigned", None, True),
        ("c", 1, 1, "reassigned", None, True),
        ("d", 9, 9, "claimed", None, False),
        ("e", 2, 9, "claimed", None, True),
        ("f", 9, None, "uncorrelated", "outside_gate", False),
        ("g", 2, None, "uncorrelated", "outside_gate", False),
        ("h", 2, None, "uncorrelated", "ambiguous", False),
        ("i", CLUTTER, None, "uncorrelated", "outside_gate", False),
        ("j", CLUTTER, 2, "confirmed", None, False),
    ]
    names = ("observation_id", "true_sat_no", "sat_no", "result", "reason", "has_wrong_tag")
    table = pl.DataFrame(rows, schema=names, orient="row").with_columns(source_kind=pl.lit("radar"))
    truth = table.select("observation_id", "source_kind", "true_sat_no", "has_wrong_tag")
    found = count_outcomes(
        table.drop("true_sat_no", "has_wrong_tag"), Scene(pl.DataFrame(), truth), pl.Series([1, 2])
    )
    assert (found["observations"], found["clutter"], found["clutter_accepted"]) == (10, 2, 1)
    assert (found["wrong"], found["wrong_claimed"], found["wrong_share"]) == (2, 1, 0.25)
    assert found["uncorrelated_share"] == 0.375
    causes = ("without_prediction", "ambiguous", "outside_gate")
    assert [found[f"uncorrelated_{cause}_share"] for cause in causes] == [0.125] * 3
    assert (found["wrong_tags"], found["wrong_tag_corrected_share"]) == (3, 0.333333)


def test_the_scene_has_the_shares_asked_for():
    catalogs = association.simulate_catalogs(300, 4)
    end = catalogs.start + 1_800_000_000
    scene = simulate_scene(catalogs.truth, catalogs.start, end, seed=4)
    real = scene.truth.filter(pl.col("true_sat_no") != CLUTTER)
    assert 0.04 < real["has_wrong_tag"].mean() <= 0.05
    assert (scene.truth.height - real.height) / real.height == pytest.approx(0.01, abs=1e-3)
    assert scene.observations["observation_id"].n_unique() == scene.truth.height
    # Only links name an object, and no track number does.
    named = scene.observations.filter(pl.col("sat_no").is_not_null())
    assert set(named["source_kind"]) == {"isl"}
    joined = scene.observations.join(scene.truth, on="observation_id")
    wrong = joined.filter(pl.col("has_wrong_tag") & (pl.col("source_kind") == "isl"))
    assert (wrong["sat_no"] != wrong["true_sat_no"]).all()
    again = simulate_scene(catalogs.truth, catalogs.start, end, seed=4)
    assert again.observations.equals(scene.observations)


def test_the_command_prints_its_figures(monkeypatch):
    monkeypatch.setattr(association, "_OBJECTS", 200)
    done = CliRunner().invoke(main, ["bench", "association", "--hours", "0.25", "--json"])
    assert done.exit_code == 0
    check_output(["bench", "association", "--json"], done.stdout)
    figures = json.loads(done.stdout)
    assert [entry["kind"] for entry in figures["kinds"]] == ["all", "isl", "optical", "radar"]
    assert figures["kinds"][0]["wrong"] == 0
    monkeypatch.setattr(association, "measure_association", lambda *_, **__: figures)
    table = CliRunner().invoke(main, ["bench", "association", "--hours", "0.25"])
    assert table.exit_code == 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_refuses_too_few_files(tmp_path, count):
    paths = [tmp_path / f"{k}.tle" for k in range(count)]
    for path in paths:
        path.write_text("")
    assert CliRunner().invoke(main, ["bench", "association", *map(str, paths)]).exit_code == 2


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_few_associations_with_real_elements_a_day_old_are_wrong(monkeypatch):
    """The specification: at most 0.1 % wrong with 5 % wrong track numbers and 1 % clutter."""
    names = (
        "0731T0348",
        "0805T0330",
        "0808T0220",
        "0808T1311",
        "0809T0227",
        "0809T1314",
        "0810T0803",
        "0811T0735",
    )
    files = [SNAPSHOTS / f"active-2026{name}Z.tle.gz" for name in names]
    monkeypatch.setattr(association, "read_catalogue", read_each_nth_object(OBJECT_STEP))
    found = measure_association(files, hours=0.25, seed=2026, say=lambda _: None)
    outcomes = found["kinds"][0]
    assert found["objects"] > 16_000 // OBJECT_STEP
    assert outcomes["observations"] > 10_000 // OBJECT_STEP
    assert outcomes["wrong_share"] <= 0.001
    assert outcomes["clutter_accepted_share"] < 0.05
    assert outcomes["uncorrelated_share"] < 0.15
