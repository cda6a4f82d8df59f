"""The radius of each object, and where it is from."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.radius_table import read_radius_table
from branchlake_dagster.sda.gp.records import TooLargeCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.sda.trust.radii import (
    FROM_DEFAULT,
    FROM_SIZE,
    FROM_TABLE,
    RADIUS_BY_SIZE,
    ObjectRadii,
)

HEADER = "ObjectID,HBR,HBRSigma,HBRSource,Mass,MassSigma,MassSource\n"
CARA = Path(__file__).parents[3] / "shared" / "data" / "cara" / "hard-body-radius-20260601.csv.gz"


def table(*rows: str) -> pl.DataFrame:
    return read_radius_table((HEADER + "\n".join(rows)).encode(), "radii", ReadLimits())


def sizes(**columns: list[object]) -> pl.DataFrame:
    return pl.DataFrame(columns, schema={"sat_no": pl.Int64, "rcs_size": pl.String, "rcs_m2": pl.Float64})


def test_the_best_source_of_each_object_counts() -> None:
    radii = ObjectRadii(
        4.0,
        table(
            "1,7.5,0,CARA Protected Primary,,,",
            "2,1.1,0,Default,,,",
            "3,1.1,0,Default,,,",
            "4,,0,DISCOS DB,,,",
        ),
        sizes(sat_no=[1, 2, 4], rcs_size=["SMALL", "SMALL", "LARGE"], rcs_m2=[None, None, None]),
    )
    radius, source = radii.get_radii(pl.Series([4, 1, 5, 2, 3, 1]))
    assert radius.to_list() == [RADIUS_BY_SIZE["LARGE"], 7.5, 4.0, RADIUS_BY_SIZE["SMALL"], 1.1, 7.5]
    assert source.to_list() == [FROM_SIZE, FROM_TABLE, FROM_DEFAULT, FROM_SIZE, FROM_TABLE, FROM_TABLE]


def test_the_size_class_follows_from_the_cross_section_where_it_is_not_stated() -> None:
    known = sizes(
        sat_no=[1, 2, 3, 4, 5, 6, 7],
        rcs_size=[None, None, None, " medium ", "N/A", None, None],
        rcs_m2=[0.099, 0.1, 1.01, 9.0, 0.01, 0.0, float("nan")],
    )
    radius, source = ObjectRadii(4.0, sizes=known).get_radii(pl.Series(range(1, 8)))
    small, medium, large = RADIUS_BY_SIZE.values()
    assert radius.to_list() == [small, medium, large, medium, small, 4.0, 4.0]
    assert source.to_list() == [FROM_SIZE] * 5 + [FROM_DEFAULT] * 2


def test_no_objects_have_no_radii() -> None:
    radius, source = ObjectRadii().get_radii(pl.Series([], dtype=pl.Int64))
    assert (radius.dtype, source.dtype, len(radius)) == (pl.Float64, pl.String, 0)


def test_rows_that_say_nothing_are_left_out() -> None:
    found = table(
        "1,0.5,,,,,",
        "x,1,,,,,",
        "2,-1,,,,,",
        "3,0,,,,,",
        "4,nan,,,,,",
        "5,1e9,,,,,",
        "1,0.6,,,,,",
        "0,1,,,,,",
    )
    assert found.rows() == [(1, 0.6, False)]


@pytest.mark.parametrize(
    "content",
    [b"", b"a,b\n1,2\n", b"ObjectID\n1\n", gzip.compress(b"ObjectID,HBR\n")[:15]],
    ids=["empty", "other-columns", "one-column", "cut-gzip"],
)
def test_a_file_of_another_layout_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableCatalogueError):
        read_radius_table(content, "radii", ReadLimits())


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused() -> None:
    with pytest.raises(TooLargeCatalogueError):
        read_radius_table(gzip.compress(HEADER.encode() * 1000), "radii", ReadLimits(max_bytes=1000))


def test_the_newest_table_of_the_folder_is_read_and_is_no_snapshot(tmp_path: Path) -> None:
    gp = GpSource(catalogue_dir=str(tmp_path))
    assert gp.radius_table() is None
    assert GpSource().radius_table() is None
    for month, radius in (("05", "1"), ("06", "2")):
        rows = gzip.compress(f"ObjectID,HBR\n9,{radius}\n".encode())
        (tmp_path / f"hard-body-radius-2026{month}01.csv.gz").write_bytes(rows)
    (tmp_path / "active-20260601T0000Z.csv").write_text("")
    assert list(gp.files()) == ["active-20260601T0000Z"]
    found = gp.radius_table()
    assert found is not None
    assert found.rows() == [(9, 2.0, False)]


@pytest.mark.skipif(not CARA.exists(), reason="NASA CARA's radius table is not beside the repository")
def test_the_table_of_nasa_cara_is_read() -> None:
    found = read_radius_table(CARA.read_bytes(), str(CARA), ReadLimits())
    assert found.height == 23_583
    station = found.filter(pl.col("sat_no") == 25544)
    assert station.height == 0 or station["radius_m"][0] > 10
    estimated = found.filter(~pl.col("is_default") & (pl.col("radius_m") < 0.178))["radius_m"]
    assert (estimated <= RADIUS_BY_SIZE["SMALL"]).mean() > 0.85
