"""The list of what is ahead: published with its catalogue, kept up by changes, with names that stay."""

# No `from __future__ import annotations`: Dagster reads the annotations.
import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import polars as pl
import pytest
from ccsds_ndm.ndm_io import NdmIo
from click.testing import CliRunner, Result

from branchlake_dagster import branchlake_definitions, publish, table_metadata
from branchlake_dagster.cli import main
from branchlake_dagster.incremental import outputs
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import (
    CONJUNCTIONS,
    conjunctions,
    list_limits,
    newest_collection,
)
from branchlake_dagster.sda.assets.ephemerides import EPHEMERIS_CONJUNCTIONS, ephemeris_conjunctions
from branchlake_dagster.sda.assets.registry import ELEMENT_HISTORY, OBJECTS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, ELEMENT_JUMPS, OBJECT_ERRORS, element_trust
from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, merge_together
from branchlake_dagster.sda.conjunctions.identity import add_event_ids
from branchlake_dagster.sda.conjunctions.rescreening import EarlierLimits
from branchlake_dagster.sda.conjunctions.screening import MINUTE
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.sda.trust.radii import DEFAULT_RADIUS_M, FROM_SIZE, FROM_TABLE, RADIUS_BY_SIZE
from branchlake_dagster_tests.sda.test_ephemerides import message, segment
from branchlake_dagster_tests.sda.test_trust import history

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
NEAR = {"ops": {"sda__conjunctions": {"config": {"threshold_km": 40.0, "horizon_h": 3.0, "tasks": 2}}}}


def approach(
    tca: datetime, *, pair: tuple[int, int] = (1, 2), kind: str = "encounter", miss: float = 1.0
) -> dict[str, Any]:
    return {
        "kind": kind,
        "tca": tca,
        "sat1_object_designator": pair[0],
        "sat2_object_designator": pair[1],
        "miss_distance_km": miss,
    }


def named(rows: list[dict[str, Any]], before: pl.DataFrame | None, at: datetime) -> pl.DataFrame:
    moment = pl.Datetime("us", "UTC")
    found = pl.DataFrame(rows).with_columns(pl.col("tca").cast(moment))
    return add_event_ids(found, before, reported=pl.lit(at).cast(moment)).sort("tca")


def test_an_event_keeps_its_name_while_it_moves():
    first = named([approach(NOON), approach(NOON + timedelta(minutes=48), miss=3.0)], None, NOON)
    assert first["event_id"].to_list() == ["1-2-20260808T120000Z", "1-2-20260808T124800Z"]
    assert first["previous_miss_distance_km"].to_list() == [None, None]
    later = NOON + timedelta(hours=1)
    moved = named(
        [approach(NOON + timedelta(minutes=9), miss=2.0), approach(NOON + timedelta(minutes=70))],
        first,
        later,
    )
    assert moved["event_id"].to_list() == ["1-2-20260808T120000Z", "1-2-20260808T131000Z"]
    assert moved["first_reported"].to_list() == [NOON, later]
    assert moved["previous_miss_distance_km"].to_list() == [1.0, None]


def test_a_name_is_given_once_to_the_nearest_and_never_to_another_pair_or_kind():
    first = named([approach(NOON)], None, NOON)
    again = named(
        [
            approach(NOON + timedelta(minutes=15)),
            approach(NOON + timedelta(minutes=1)),
            approach(NOON, pair=(1, 3)),
            approach(NOON, kind="together"),
        ],
        first,
        NOON,
    )
    assert again["event_id"].n_unique() == 4
    mine = again.filter(pl.col("event_id") == "1-2-20260808T120000Z")
    assert mine["tca"].to_list() == [NOON + timedelta(minutes=1)]


def test_those_that_are_together_are_one_event_whenever_they_are_nearest():
    first = named([approach(NOON, kind="together")], None, NOON)
    again = named([approach(NOON + timedelta(hours=20), kind="together")], first, NOON)
    assert again["event_id"].to_list() == ["1-2-together"]


@pytest.mark.parametrize("seed", range(5))
def test_ids_do_not_depend_on_the_order_of_rows_nor_on_other_pairs(seed):
    print(f"seed {seed}")  # noqa: T201 - a failure is repeated by it
    generator = np.random.default_rng(seed)

    def rows(count: int) -> list[dict[str, Any]]:
        minutes = {
            (int(pair), int(minute))
            for pair, minute in zip(
                generator.integers(0, 4, count), generator.integers(0, 60, count), strict=True
            )
        }
        return [
            approach(NOON + timedelta(minutes=minute), pair=(1, 2 + pair), miss=float(generator.random()))
            for pair, minute in sorted(minutes)
        ]

    first = named(rows(30), None, NOON)
    again = rows(30)
    expected = named(again, first, NOON).sort(pl.all())
    assert expected["previous_miss_distance_km"].drop_nulls().len() > 5
    shuffled = [again[k] for k in generator.permutation(len(again))]
    assert (
        named(shuffled, first.sample(fraction=1.0, shuffle=True, seed=seed), NOON)
        .sort(pl.all())
        .equals(expected)
    )
    parts = [
        named(
            [row for row in again if row["sat2_object_designator"] == number],
            first.filter(sat2_object_designator=number),
            NOON,
        )
        for number in sorted({row["sat2_object_designator"] for row in again})
    ]
    assert pl.concat(parts).sort(pl.all()).equals(expected)


def test_minutes_together_that_several_tasks_found_are_one_row():
    found = pl.DataFrame(
        [
            approach(NOON, kind="together", miss=2.0) | {"together_min": 3},
            approach(NOON + timedelta(minutes=9), kind="together", miss=1.0) | {"together_min": 4},
            approach(NOON, pair=(1, 3), kind="together", miss=0.5) | {"together_min": 2},
            approach(NOON + timedelta(minutes=30)) | {"together_min": 0},
        ]
    ).with_columns(pl.col("tca").cast(pl.Datetime("us", "UTC")))
    types = pl.DataFrame(pl.from_arrow(ENCOUNTER_SCHEMA.empty_table())).schema
    whole = found.select(
        (pl.col(name) if name in found.columns else pl.lit(1.0)).cast(kind).alias(name)
        if kind == pl.Float64 or name in found.columns
        else pl.lit(NOON).cast(kind).alias(name)
        for name, kind in types.items()
    )
    for rows in (whole, whole.reverse()):
        merged = merge_together(rows).sort("tca", "sat2_object_designator")
        assert merged.select("kind", "miss_distance_km", "together_min").rows() == [
            ("together", 0.5, 2),
            ("together", 1.0, 7),
            ("encounter", 1.0, 0),
        ]
        assert merged["tca"][1] == NOON + timedelta(minutes=9)


def test_it_begins_at_the_newest_snapshot():
    def begin(*names: str, **columns: list[datetime | None]) -> datetime:
        times = {name: pl.Series(values, dtype=pl.Datetime("us", "UTC")) for name, values in columns.items()}
        rows = pl.DataFrame({"snapshot_id": pl.Series(names, dtype=pl.String), **times})
        return datetime.fromtimestamp(newest_collection(rows.to_arrow()) / 1e6, UTC)

    reference = datetime(2026, 8, 8, tzinfo=UTC)
    names = ["active-20260808T0713Z", "sim-1", "active-20260808T1311Z"]
    assert begin(*names) == datetime(2026, 8, 8, 13, 11, tzinfo=UTC)
    assert begin() == begin("sim-1") == reference
    # A file without a time in its name was collected when it was last modified.
    late = datetime(2026, 11, 27, 9, 30, 20, tzinfo=UTC)
    assert begin("active", "active", collected_at=[late, late - timedelta(days=1)]) == late.replace(second=0)
    assert begin("active", collected_at=[None]) == reference
    assert begin("active-20260808T0713Z", collected_at=[late]) == datetime(2026, 8, 8, 7, 13, tzinfo=UTC)


def test_an_empty_list_has_no_time():
    assert list_limits(pl.DataFrame(schema={"kind": pl.String}), 14.0) is None


def test_a_list_with_another_limit_of_age_left_out_other_objects():
    found = pl.DataFrame(
        {"screened_from": [NOON], "screened_until": [NOON + timedelta(hours=1)], "threshold_km": [5.0]}
    ).with_columns(max_element_age_days=pl.lit(14.0))
    begin = int(NOON.timestamp()) * 1_000_000
    assert list_limits(found, 14.0) == EarlierLimits(begin, begin + 60 * MINUTE, 5.0)
    assert list_limits(found, 30.0) is None
    assert list_limits(found.drop("max_element_age_days"), 14.0) is None


# -- on the stack --------------------------------------------------------------------------------------

given: dict[str, pl.DataFrame] = {}


@dg.asset(key=CATALOGUE, metadata=table_metadata(write_mode="upsert", keys=["sat_no"], require_checks=False))
def catalogue() -> pl.DataFrame:
    return given["catalogue"]


@dg.asset(key=ELEMENT_HISTORY, metadata=table_metadata(write_mode="replace_table", require_checks=False))
def element_history() -> pl.DataFrame:
    """Ten sets each of a hundred objects, and one of them in two snapshots."""
    parts = [
        pl.DataFrame(part.values, schema=list(ELEMENT_FIELDS)).with_columns(
            pl.Series("sat_no", part.sat_no),
            pl.Series("epoch", part.epoch_micros).cast(pl.Datetime("us", "UTC")),
            pl.lit(f"sim-{k}").alias("snapshot_id"),
            pl.lit(NOON + timedelta(hours=k)).alias("collected_at"),
        )
        for k, part in enumerate(history(100, 10, 1.0, 0.01))
    ]
    return pl.concat([*parts, parts[-1].with_columns(snapshot_id=pl.lit("sim-again"))])


TRUST = (ELEMENT_ERRORS, OBJECT_ERRORS, ELEMENT_JUMPS)


def elements_at(snapshot: str, moved: list[int]) -> pl.DataFrame:
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).filter(pl.col("mean_motion") > 11)
    anomaly = (
        pl.when(pl.col("sat_no").is_in(moved)).then(pl.col("mean_anomaly") / 2).otherwise("mean_anomaly")
    )
    return frame.with_columns(
        anomaly.alias("mean_anomaly"),
        pl.lit(snapshot).alias("snapshot_id"),
        pl.lit("TEST").alias("data_mode"),
    )


def ephemeris_of(number: int, begin: datetime, end: datetime) -> bytes:
    frame = given["catalogue"] if number in given["catalogue"]["sat_no"] else elements_at("", [])
    sets = Elements.from_arrow(frame.sort("sat_no").to_arrow())
    row = int(np.searchsorted(sets.sat_no, number))
    span = [int(one.timestamp()) * 1_000_000 for one in (begin, end)]
    made = segment(sets, row, begin=span[0], end=span[1])
    return message(made)


@pytest.fixture
def gp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gp")


@pytest.fixture
def run(lakehouse: Lakehouse, gp_folder: Path) -> Iterator[Callable[..., dg.ExecuteInProcessResult]]:
    checked = {CONJUNCTIONS, EPHEMERIS_CONJUNCTIONS, *TRUST}
    checks = [one for one in fusion_checks if checked & {key.asset_key for key in one.check_keys}]
    definitions = branchlake_definitions(
        lakehouse.settings,
        dg.Definitions(
            assets=[catalogue, element_history, element_trust, conjunctions, ephemeris_conjunctions],
            asset_checks=checks,
            resources={"gp": GpSource(catalogue_dir=str(gp_folder))},
        ),
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    drop_tables(lakehouse)  # those of other tests of the pipeline, in the lake that they share
    with dg.DagsterInstance.ephemeral() as instance:

        def launch(*keys: dg.AssetKey, **more: Any) -> dg.ExecuteInProcessResult:
            done = job.execute_in_process(instance=instance, asset_selection=list(keys), **more)
            outcome = publish(done, definitions, instance=instance)
            assert outcome.published, outcome
            return done

        yield launch
    drop_tables(lakehouse)


def drop_tables(lakehouse: Lakehouse) -> None:
    main = lakehouse.catalog("main")
    for key in (CATALOGUE, CONJUNCTIONS, EPHEMERIS_CONJUNCTIONS, ELEMENT_HISTORY, OBJECTS, *TRUST):
        if main.table_exists(tuple(key.path)):
            main.drop_table(tuple(key.path))


def why(done: dg.ExecuteInProcessResult) -> str:
    (event,) = done.asset_materializations_for_node("sda__conjunctions")
    return str(event.metadata["screening"].value)


def table_of(lakehouse: Lakehouse, key: dg.AssetKey) -> pl.DataFrame:
    return pl.DataFrame(lakehouse.catalog("main").load_table(tuple(key.path)).scan().to_arrow())


def listed(lakehouse: Lakehouse) -> pl.DataFrame:
    return table_of(lakehouse, CONJUNCTIONS).sort("event_id")


def retry_after_write(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the next step that consumes changes fail once, after its rows are written. Returns its attempts."""
    attempts: list[int] = []
    record = outputs.record_consumption

    def fail_once(*arguments: Any) -> Any:
        table = record(*arguments)
        attempts.append(len(attempts) + 1)
        if len(attempts) == 1:
            raise dg.RetryRequested(max_retries=1)
        return table

    monkeypatch.setattr(outputs, "record_consumption", fail_once)
    return attempts


@pytest.mark.spark
def test_a_list_kept_up_by_changes_is_the_one_made_anew(lakehouse, run, gp_folder, tmp_path, monkeypatch):
    given["catalogue"] = elements_at("sim-20260808T1200Z", [])
    run(CATALOGUE)
    assert "no earlier list" in why(run(CONJUNCTIONS, run_config=NEAR))
    first = listed(lakehouse)
    published = lakehouse.nessie.reference("main").hash
    assert first.height > 20
    assert first["screened_from"].unique().to_list() == [NOON]
    assert first["screened_until"].unique().to_list() == [NOON + timedelta(hours=3)]
    assert first["previous_miss_distance_km"].null_count() == first.height
    assert first["no_probability_because"].unique().to_list() == ["no error model"]
    assert first["hard_body_radius_m"].unique().to_list() == [2 * DEFAULT_RADIUS_M]
    tabled, sized = (int(first[f"sat{k}_object_designator"][0]) for k in (1, 2))
    (gp_folder / "hard-body-radius-20260801.csv").write_text(f"ObjectID,HBR\n{tabled},3.25\n")
    objects = pl.DataFrame({"sat_no": [sized], "rcs_size": ["SMALL"], "rcs_m2": [0.0]}).to_arrow()
    lakehouse.catalog("main").create_table(tuple(OBJECTS.path), objects.schema).append(objects)
    run(ELEMENT_HISTORY, *TRUST)

    numbers = given["catalogue"]["sat_no"].to_list()
    # Two objects are somewhere else, and the snapshot is an hour younger.
    changed = elements_at("sim-20260808T1300Z", numbers[:2]).filter(pl.col("sat_no").is_in(numbers[:2]))
    given["catalogue"] = changed
    run(CATALOGUE)
    attempts = retry_after_write(monkeypatch)
    assert why(run(CONJUNCTIONS, run_config=NEAR)) == "pairs of 2 changed objects"
    assert attempts == [1, 2]
    monkeypatch.undo()
    kept_up = listed(lakehouse)
    later = NOON + timedelta(hours=1)
    # The repeated step compares with the published list, and not with that of its first attempt.
    new = kept_up.filter(pl.col("first_reported") == later)
    assert new.height > 0
    assert new["previous_miss_distance_km"].null_count() == new.height
    assert kept_up["screened_from"].unique().to_list() == [later]
    again = kept_up.filter(pl.col("first_reported") == NOON)
    assert again.height > 5
    assert set(again["event_id"]) <= set(first["event_id"])
    chances = kept_up["collision_probability"]
    assert chances.drop_nulls().len() > 5, kept_up["no_probability_because"].value_counts().rows()
    assert kept_up["error_model_id"].unique().to_list() == [
        table_of(lakehouse, ELEMENT_ERRORS)["error_model_id"][0]
    ]
    assert table_of(lakehouse, OBJECT_ERRORS).height == 100
    for number, radius, source in (
        (tabled, 3.25, FROM_TABLE),
        (sized, RADIUS_BY_SIZE["SMALL"], FROM_SIZE),
    ):
        told = [
            kept_up.filter(pl.col(f"sat{k}_object_designator") == number)
            .select(f"sat{k}_radius_m", f"sat{k}_radius_source")
            .rows()
            for k in (1, 2)
        ]
        assert {*told[0], *told[1]} == {(radius, source)}
    # What the new begin has cut is closest there, or together for less.
    same = again.filter(~pl.col("sat1_object_designator").is_in(numbers[:2]), kind="encounter")
    assert (same["previous_miss_distance_km"] - same["miss_distance_km"]).abs().max() < 1e-9

    def asked(*arguments: str) -> pl.DataFrame:
        done = CliRunner().invoke(
            main,
            ["conjunctions", "--csv", *arguments],
            env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)},
        )
        assert done.exit_code == 0, done.output
        assert "screened 2026-08-08" in done.stderr
        return pl.read_csv(io.StringIO(done.stdout), try_parse_dates=True)

    one = first["sat1_object_designator"][0]
    pair = ["sat1_object_designator", "sat2_object_designator"]
    of_one = kept_up.filter(pl.any_horizontal(pl.col(pair) == one))
    assert set(asked("--object", str(one))["event_id"]) == set(of_one["event_id"])
    assert asked()["miss_distance_km"].is_sorted()
    before = asked("--at", published)
    assert set(before["event_id"]) == set(first["event_id"])
    until = asked("--until", f"{later + timedelta(minutes=30):%Y-%m-%dT%H:%M}", "--within", "20")
    expected = kept_up.filter(pl.col("tca") < later + timedelta(minutes=30), pl.col("miss_distance_km") <= 20)
    assert set(until["event_id"]) == set(expected["event_id"])
    changes = asked("--changes-since", published)
    gone = set(changes.filter(change="gone")["event_id"])
    assert gone == set(first["event_id"]) - set(kept_up["event_id"])
    assert set(changes.filter(change="new")["event_id"]) == set(kept_up["event_id"]) - set(first["event_id"])

    def messages(*arguments: str) -> Result:
        return CliRunner().invoke(
            main,
            ["conjunctions", "--cdm", str(tmp_path), "--originator", "abc", *arguments],
            env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)},
        )

    done = messages("--kind", "encounter")
    assert done.exit_code == 0, done.output
    encounters = kept_up.filter(kind="encounter")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == encounters.height
    read = [NdmIo().from_path(path) for path in tmp_path.iterdir()]
    assert {one.header.message_id.rpartition("_")[0] for one in read} == {
        event.upper() for event in encounters["event_id"]
    }
    # Again, and of the whole list: the same files, and the rows that cannot be one are told.
    done = messages()
    assert (done.exit_code, sorted(path.name for path in tmp_path.iterdir())) == (1, names)
    others = kept_up.height - encounters.height
    assert f"{others} row" in done.stderr
    # The list of before is read with the catalogue of before.
    done = messages("--kind", "encounter", "--at", published, "--cdm-format", "xml")
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("*.cdm.xml"))) == first.filter(kind="encounter").height
    assert messages("--csv").exit_code == 2

    # An object's own ephemeris has the close approaches that the list has of it.
    number = int(encounters["sat1_object_designator"].mode().sort()[0])
    oem = tmp_path / "own.oem"
    oem.write_bytes(ephemeris_of(number, later, later + timedelta(hours=3)))
    done = CliRunner().invoke(
        main,
        ["screen-ephemeris", str(oem), "--csv", "--within", "40", "--exclude", str(number)],
        env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)},
    )
    assert done.exit_code == 0, done.output
    own = pl.read_csv(io.StringIO(done.stdout))
    of_it = kept_up.filter(pl.any_horizontal(pl.col(pair) == number))
    assert own.height == of_it.height > 0
    distances = [frame["miss_distance_km"].sort() for frame in (own, of_it)]
    assert (distances[0] - distances[1]).abs().max() < 1e-3
    assert set(own["sat1_source"]) == {"ephemeris"}
    shown = CliRunner().invoke(
        main,
        ["screen-ephemeris", str(oem), "--within", "40", "--exclude", str(number), "--rows", "0"],
        env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)},
    )
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("A <SAT> & B") == own.height
    outside = CliRunner().invoke(
        main,
        ["screen-ephemeris", str(oem), "--since", "2100-01-01"],
        env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)},
    )
    assert (outside.exit_code, outside.stdout) == (1, "")
    # Published as a table by the asset, from a folder.
    folder = tmp_path / "oem"
    folder.mkdir()
    oem.rename(folder / "own.oem")
    how = {"folder": str(folder), "threshold_km": 40.0, "exclude": [number]}
    run(EPHEMERIS_CONJUNCTIONS, run_config={"ops": {"sda__ephemeris_conjunctions": {"config": how}}})
    table = table_of(lakehouse, EPHEMERIS_CONJUNCTIONS)
    assert table["miss_distance_km"].sort().to_list() == pytest.approx(
        own["miss_distance_km"].sort().to_list()
    )
    assert table["ephemeris"].unique().to_list() == ["own.oem"]
    oem.write_text("CCSDS_OEM_VERS = 2.0\n")
    done = CliRunner().invoke(
        main, ["screen-ephemeris", str(oem)], env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)}
    )
    assert (done.exit_code, "no segment" in done.stderr) == (1, True)

    everything = run(CONJUNCTIONS, run_config=NEAR, tags={"branchlake/rebuild": "true"})
    assert "of the objects have changed" in why(everything)
    told = ["event_id", "previous_miss_distance_km", "first_reported"]
    assert listed(lakehouse).drop(told).sort(pl.all()).equals(kept_up.drop(told).sort(pl.all()))
