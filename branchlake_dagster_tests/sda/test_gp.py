import gzip
import json
import os
import pickle
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from sgp4.api import Satrec

from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.records import ELEMENT_COLUMNS, EmptyCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.simulated import (
    ABSURD_MEAN_MOTION,
    REFERENCE_EPOCH,
    simulated_elements,
    simulated_gp_file,
)
from branchlake_dagster.sda.gp.write import format_omm_json, format_tle
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.suite.soak import soaking

NAME = "CALSPHERE 1             "
L1 = "1 00900U 64063C   26219.83494579  .00000367  00000+0  36362-3 0  9995"
L2 = "2 00900  90.2189  72.9749 0026971 132.1345 239.3619 13.76672350 78538"
OMM = {
    "OBJECT_NAME": "NEW ONE",
    "OBJECT_ID": "2026-150A",
    "EPOCH": "2026-08-08T01:02:03.123456",
    "MEAN_MOTION": 15.5,
    "ECCENTRICITY": 0.001,
    "INCLINATION": 51.6,
    "RA_OF_ASC_NODE": 1.0,
    "ARG_OF_PERICENTER": 2.0,
    "MEAN_ANOMALY": 3.0,
    "EPHEMERIS_TYPE": 0,
    "CLASSIFICATION_TYPE": "U",
    "NORAD_CAT_ID": 100001,
    "ELEMENT_SET_NO": 999,
    "REV_AT_EPOCH": 1,
    "BSTAR": 1e-5,
    "MEAN_MOTION_DOT": 1e-5,
    "MEAN_MOTION_DDOT": 0,
}
SNAPSHOTS = Path(os.environ.get("BRANCHLAKE_TEST_GP") or Path(__file__).parents[2].parent / "shared/data/gp")
"""The real snapshots, which are kept beside the repository and never in it."""


def checksum(line: str) -> str:
    return str(sum(int(c) if c.isdigit() else c == "-" for c in line[:68]) % 10)


def signed(line: str) -> str:
    return line[:68] + checksum(line)


def read(text: str):
    return read_catalogue(text.encode(), "test")


def reasons(text: str) -> list[tuple[int, str]]:
    return list(read(text).rejected.select("line_number", "reason").iter_rows())


def test_reads_three_and_two_line_sets_plain_and_gzipped():
    three = read(f"{NAME}\r\n{L1}\r\n{L2}\r\n")
    two = read(f"{L1}\n{L2}")
    packed = read_catalogue(gzip.compress(f"{NAME}\n{L1}\n{L2}\n".encode()), "test")
    (row,) = three.elements.to_dicts()
    assert row["sat_no"] == 900
    assert row["object_name"] == "CALSPHERE 1"
    assert row["object_id"] == "1964-063C"
    assert row["epoch"] == datetime(2026, 8, 7, 20, 2, 19, 316256, tzinfo=UTC)
    assert row["bstar"] == pytest.approx(0.00036362)
    assert (row["line_number"], two.elements["line_number"][0]) == (2, 1)
    assert two.elements["object_name"][0] is None
    assert packed.elements.equals(three.elements)
    assert three.elements.schema == pl.Schema(ELEMENT_COLUMNS)


def test_agrees_with_the_sgp4_package():
    reference = Satrec.twoline2rv(L1, L2)
    (row,) = read(f"{L1}\n{L2}").elements.to_dicts()
    assert row["eccentricity"] == reference.ecco
    assert row["bstar"] == pytest.approx(reference.bstar, rel=1e-12)


def test_names_that_look_like_element_lines_stay_names():
    parsed = read(f"1 HOPEFUL SAT\n{L1}\n{L2}\n")
    assert parsed.rejected.height == 0
    assert parsed.elements["object_name"][0] == "1 HOPEFUL SAT"
    assert read(f"0 VANGUARD\n{L1}\n{L2}").elements["object_name"][0] == "VANGUARD"


@pytest.mark.parametrize(
    ("field", "number"),
    [("A0000", 100_000), ("E8493", 148_493), ("J2931", 182_931), ("P4018", 234_018), ("Z9999", 339_999)],
)
def test_alpha5_numbers(field, number):
    lines = [signed(line[:2] + field + line[7:]) for line in (L1, L2)]
    assert read("\n".join(lines)).elements["sat_no"][0] == number


@pytest.mark.parametrize("field", ["I0000", "O1234", "a1234", "1234A", "     "])
def test_numbers_that_are_neither_digits_nor_alpha5(field):
    lines = [signed(line[:2] + field + line[7:]) for line in (L1, L2)]
    assert reasons("\n".join(lines)) == [(1, "catalogue_number")]


def test_malformed_records_are_rejected_one_by_one():
    good = f"{NAME}\n{L1}\n{L2}\n"
    bad_sum = L1[:68] + str((int(L1[68]) + 1) % 10)
    other = signed(L2.replace("00900", "00901", 1))
    xp = signed(L1[:62] + "4" + L1[63:])
    letters = signed(L2[:8] + "abcdefgh" + L2[16:])
    text = (
        good
        + f"{bad_sum}\n{L2}\n"  # 4
        + f"{L1}\n{other}\n"  # 6
        + f"{xp}\n{L2}\n"  # 8
        + f"{L1}\n{letters}\n"  # 10
        + f"{L1[:60]}\n{L2}\n"  # 12
        + f"{L2}\n"  # 14, no line 1
        + "GARBAGE\n\n"  # 15
        + f"{L1}\n"  # 17, no line 2
    )
    assert reasons(text) == [
        (4, "checksum"),
        (6, "catalogue_number"),
        (8, "ephemeris_type"),
        (10, "field"),
        (12, "line_length"),
        (14, "orphan_line"),
        (15, "orphan_line"),
        (17, "orphan_line"),
    ]
    parsed = read(text)
    assert parsed.elements["sat_no"].to_list() == [900]
    assert parsed.rejected["raw_text"][0] == f"{bad_sum}\n{L2}"
    assert "checksum" in parsed.rejected["message"][0]


def test_bytes_outside_ascii_are_a_rejected_record():
    assert reasons(f"{L1[:30]}é{L1[31:]}\n{L2}")[0][1] in {"checksum", "field"}
    assert read_catalogue(b"\xff\xfe\x00garbage", "test").rejected.height == 1


def test_duplicates_keep_the_latest_epoch():
    later = signed(L1.replace("26219.8349", "26219.9349"))
    parsed = read(f"{later}\n{L2}\n{L1}\n{L2}\n")
    assert parsed.elements["line_number"].to_list() == [1]
    (rejected,) = parsed.rejected.to_dicts()
    assert (rejected["line_number"], rejected["reason"], rejected["sat_no"]) == (3, "duplicate_object", 900)


@pytest.mark.parametrize(
    "content", [b"", b"\n \r\n", b"[]", gzip.compress(b"")], ids=["nothing", "blank", "json", "gzip"]
)
def test_an_empty_catalogue_is_an_error(content):
    with raising(EmptyCatalogueError, source="active.tle"):
        read_catalogue(content, "active.tle")


@pytest.mark.parametrize(
    "content",
    [
        b"[{",
        b"[1",
        b"<ndm><omm>",
        b"<!DOCTYPE x><ndm/>",
        gzip.compress(b"x" * 1000)[:20],
    ],
    ids=["cut-object", "cut-array", "cut-xml", "doctype", "cut-gzip"],
)
def test_a_damaged_file_is_an_error_that_survives_pickling(content):
    with pytest.raises(UnreadableCatalogueError) as caught:
        read_catalogue(content, "a.json")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_omm_json_with_numbers_or_text_and_nine_digits():
    text = {k: str(v) for k, v in OMM.items()} | {"NORAD_CAT_ID": "270000123"}
    parsed = read(json.dumps([OMM, text]))
    assert parsed.elements["sat_no"].to_list() == [100_001, 270_000_123]
    assert parsed.elements["mean_motion"].to_list() == [15.5, 15.5]
    assert parsed.elements["epoch"][0] == datetime(2026, 8, 8, 1, 2, 3, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"NORAD_CAT_ID": "x"}, "catalogue_number"),
        ({"NORAD_CAT_ID": 1_000_000_000}, "catalogue_number"),
        ({"NORAD_CAT_ID": None}, "catalogue_number"),
        ({"EPHEMERIS_TYPE": 4}, "ephemeris_type"),
        ({"MEAN_ELEMENT_THEORY": "SGP4-XP"}, "ephemeris_type"),
        ({"MEAN_ELEMENT_THEORY": "DSST"}, "unsupported_message"),
        ({"REF_FRAME": "EME2000"}, "unsupported_message"),
        ({"NESTED": {}}, "unsupported_message"),
        ({"EPOCH": "yesterday"}, "field"),
        ({"BSTAR": "thick"}, "field"),
        ({"MEAN_MOTION": "NaN"}, "field"),
        ({"MEAN_MOTION_DOT": "much"}, "field"),
        ({"ECCENTRICITY": 1.0}, "field"),
    ],
)
def test_malformed_omm_records(change, reason):
    parsed = read(json.dumps([OMM, OMM | {"NORAD_CAT_ID": 5} | change]))
    assert parsed.elements.height == 1
    assert [(2, reason)] == list(parsed.rejected.select("line_number", "reason").iter_rows())


def test_the_four_encodings_of_omm_agree():
    fields = {k: v for k, v in OMM.items() if k != "EPOCH"} | {"EPOCH": "2026-220T01:02:03.123456"}
    kvn = "CCSDS_OMM_VERS = 3.0\nCOMMENT made by hand\n" + "".join(f"{k} = {v}\n" for k, v in fields.items())
    kvn = kvn.replace("MEAN_MOTION = 15.5", "MEAN_MOTION = 15.5 [rev/day]")
    tags = "".join(f"<{k}>{v}</{k}>" for k, v in OMM.items())
    xml = f'<?xml version="1.0"?><ndm><omm id="CCSDS_OMM_VERS"><body>{tags}</body></omm></ndm>'
    csv = ",".join(OMM) + "\n" + ",".join(str(v) for v in OMM.values()) + "\n"
    expected = read(json.dumps(OMM)).elements
    assert expected.height == 1
    for text, line in ((kvn, 1), (xml, 1), (csv, 2)):
        elements = read(text).elements
        assert elements["line_number"].to_list() == [line]
        assert elements.drop("line_number").equals(expected.drop("line_number"))


ANGLE = st.integers(0, 3_599_999).map(lambda n: n / 10_000)
ROW = st.fixed_dictionaries(
    {
        "sat_no": st.integers(1, 339_999),
        "object_name": st.sampled_from(["A", "COSMOS 1408 DEB", "1 HOP", "0X"]),
        "object_id": st.sampled_from(["1957-001A", "2026-150ABC", "1999-025DEF", None]),
        "epoch": st.integers(0, 40 * 365 * 100_000_000).map(
            lambda n: datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=864 * n)
        ),
        "mean_motion": st.integers(1_000_000, 17_00000000).map(lambda n: n / 1e8),
        "eccentricity": st.integers(0, 9_999_999).map(lambda n: n / 1e7),
        "inclination": st.integers(0, 1_800_000).map(lambda n: n / 10_000),
        "ra_of_asc_node": ANGLE,
        "arg_of_pericenter": ANGLE,
        "mean_anomaly": ANGLE,
        "element_set_no": st.integers(0, 9999),
        "rev_at_epoch": st.integers(0, 99_999),
        "bstar": st.tuples(st.integers(10_000, 99_999), st.integers(-8, 0), st.sampled_from([1, -1])).map(
            lambda t: float(f"{t[2] * t[0]}e{t[1] - 5}")
        ),
        "mean_motion_dot": st.integers(-9_999_999, 9_999_999).map(lambda n: n / 1e8),
    }
)


@pytest.mark.long
@seed(20261121)
@settings(max_examples=150 if soaking() else 50, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5, unique_by=lambda r: r["sat_no"]))
def test_tle_text_round_trip(rows):
    fixed = {
        "ephemeris_type": 0,
        "classification_type": "U",
        "mean_motion_ddot": 0.0,
        "source_format": "TLE",
        "line_number": 1,
    }
    frame = pl.DataFrame([{**r, **fixed} for r in rows], schema_overrides=ELEMENT_COLUMNS)
    frame = frame.select(pl.col(c).cast(t) for c, t in ELEMENT_COLUMNS.items()).sort("sat_no")
    parsed = read(format_tle(frame))
    assert parsed.rejected.height == 0
    back = parsed.elements
    for column in back.columns:
        if column == "bstar":
            assert back[column].to_list() == pytest.approx(frame[column].to_list(), rel=1e-12)
        elif column != "line_number":
            assert back[column].to_list() == frame[column].to_list(), column


def test_simulation_is_a_function_of_seed_and_time():
    one, again, other = (simulated_gp_file(seed=s, objects=300, epoch=REFERENCE_EPOCH) for s in (1, 1, 2))
    assert one == again != other
    parsed = read(one)
    assert parsed.elements.height == 300
    assert parsed.rejected.height == 0
    assert (parsed.elements["sat_no"] > 99_999).sum() == 30
    later = simulated_elements(seed=1, objects=300, epoch=REFERENCE_EPOCH + timedelta(hours=2))
    assert later["sat_no"].to_list() == parsed.elements["sat_no"].to_list()
    assert later["inclination"].to_list() == pytest.approx(parsed.elements["inclination"].to_list())


def test_the_bad_simulated_file_is_bad_on_a_visible_share():
    parsed = read(simulated_gp_file(seed=1, objects=2000, epoch=REFERENCE_EPOCH, bad=True))
    reasons = dict(parsed.rejected.group_by("reason").len().iter_rows())
    assert reasons["checksum"] == 250
    assert reasons.keys() == {"checksum", "field"}
    absurd = parsed.rejected.filter(pl.col("reason") == "field")
    assert absurd["field"].unique().to_list() == ["mean_motion"]
    assert absurd.height > 150
    assert f"mean_motion is {ABSURD_MEAN_MOTION}, outside of (0, 17.5]" in absurd["message"][0]


def test_tle_cannot_hold_a_number_above_alpha5():
    elements = simulated_elements(seed=1, objects=20, epoch=REFERENCE_EPOCH)
    huge = elements.with_columns(sat_no=pl.col("sat_no") + 300_000)
    with raising(ValueError, "OMM"):
        format_tle(huge)
    assert read(format_omm_json(huge)).elements.height == 20


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_real_snapshots():
    files = sorted(SNAPSHOTS.glob("active-*.tle.gz"))
    assert files
    for path in (files[0], files[-1]):
        content = path.read_bytes()
        begin = time.process_time()
        parsed = read_catalogue(content, path.name)
        # Of this process alone: 0.16 s on the machine where this was written; a loop over records takes several seconds.
        assert time.process_time() - begin < 2
        # Snapshots of other weeks hold other numbers of objects: each of its own is read.
        assert parsed.elements.height == gzip.decompress(content).count(b"\n1 ") > 15_000
        assert parsed.rejected.height == 0
    again = read(format_tle(parsed.elements)).elements
    assert again.drop("line_number").equals(parsed.elements.drop("line_number"))
