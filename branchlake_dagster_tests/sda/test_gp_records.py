"""What providers really serve, and what nobody should: each damaged record by itself, its neighbours unharmed."""

import contextlib
import csv
import gzip
import io
import json
import tracemalloc
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from sgp4 import omm as reference
from sgp4.api import Satrec

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.records import CatalogueError, TooLargeCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.gp.write import format_omm_json, format_tle
from branchlake_dagster_tests.sda.test_gp import L1, L2, OMM, SNAPSHOTS, read, signed
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.suite.soak import soaking


def tle(number: int, *, one=(), two=()) -> str:
    """An element set of object `number` with texts put at columns (counted from 1) of its lines."""
    lines = [L1, L2]
    for k, changes in enumerate([[(3, f"{number:05d}"), *one], [(3, f"{number:05d}"), *two]]):
        for column, text in changes:
            lines[k] = lines[k][: column - 1] + text + lines[k][column - 1 + len(text) :]
    return "\n".join(map(signed, lines)) + "\n"


def as_csv(*messages: dict, names=tuple(OMM)) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(messages)
    return out.getvalue()


def as_kvn(*messages: dict) -> str:
    body = "CCSDS_OMM_VERS = 2.0\nCOMMENT x = y\nCREATION_DATE = 2026-08-08T00:00:00\n{}\n"
    return "".join(body.format("\n".join(f"{k} = {v}" for k, v in m.items())) for m in messages)


_METADATA = ("OBJECT_NAME", "OBJECT_ID", "CENTER_NAME", "REF_FRAME", "TIME_SYSTEM", "MEAN_ELEMENT_THEORY")
_LINES_ONLY = ("EPHEMERIS_TYPE", "CLASSIFICATION_TYPE", "NORAD_CAT_ID", "ELEMENT_SET_NO", "REV_AT_EPOCH")
_LINES_ONLY += ("BSTAR", "MEAN_MOTION_DOT", "MEAN_MOTION_DDOT")


def as_xml(*messages: dict, prefix="", namespace="") -> str:
    p = f"{prefix}:" if prefix else ""
    ns = f' xmlns{":" + prefix if prefix else ""}="{namespace}"' if namespace else ""

    def element(name, *inside):
        return f"<{p}{name}>{''.join(map(str, inside))}</{p}{name}>"

    def message(fields):
        parts = {"metadata": "", "meanElements": "", "tleParameters": ""}
        for k, v in fields.items():
            part = "metadata" if k in _METADATA else "tleParameters" if k in _LINES_ONLY else "meanElements"
            parts[part] += element(k, v)
        elements = (element(name, parts[name]) for name in ("meanElements", "tleParameters"))
        segment = element("segment", element("metadata", parts["metadata"]), element("data", *elements))
        return "\n" + element("omm", element("body", segment))

    body = "".join(map(message, messages))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{p}ndm{ns}>{body}\n</{p}ndm>'


def number(n: int, **changes) -> dict:
    return OMM | {"NORAD_CAT_ID": n} | changes


ENCODINGS = {
    "json": lambda *m: json.dumps(m),
    "csv": as_csv,
    "kvn": as_kvn,
    "xml": as_xml,
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mean_motion", "NaN"),
        ("mean_motion", "17.6"),
        ("mean_motion", "0"),
        ("mean_motion", "-15.5"),
        ("mean_motion", "1e999"),
        ("eccentricity", "-0.1"),
        ("eccentricity", "1.0"),
        ("inclination", "180.1"),
        ("inclination", "inf"),
        ("ra_of_asc_node", "361"),
        ("arg_of_pericenter", "-1"),
        ("mean_anomaly", "nan"),
        ("bstar", "99999"),
        ("bstar", "-inf"),
        ("mean_motion_dot", "inf"),
        ("rev_at_epoch", "-1"),
        ("element_set_no", "3.5"),
        ("epoch", "2026-366T00:00:00"),
        ("epoch", "2026-02-29T00:00:00"),
        ("epoch", "1856-01-01T00:00:00"),
        ("epoch", ""),
    ],
)
def test_a_value_that_cannot_be_true_rejects_its_record_alone(encode, field, value):
    parsed = read(encode(number(7), number(8, **{field.upper(): value}), number(9)))
    assert parsed.elements["sat_no"].to_list() == [7, 9]
    (row,) = parsed.rejected.to_dicts()
    assert (row["sat_no"], row["reason"], row["field"]) == (8, "field", field)
    assert field in row["message"].lower()
    assert value in row["raw_text"]


@pytest.mark.parametrize(
    ("one", "two", "field"),
    [
        ([(19, "26366.00000000")], [], "epoch"),
        ([(19, "26000.50000000")], [], "epoch"),
        ([(54, " 99999+9")], [], "bstar"),
        ([(34, "       NaN")], [], "mean_motion_dot"),
        ([], [(9, "180.0001")], "inclination"),
        ([], [(9, "     NaN")], "inclination"),
        ([], [(18, "-10.0000")], "ra_of_asc_node"),
        ([], [(35, "     inf")], "arg_of_pericenter"),
        ([], [(44, "999.0000")], "mean_anomaly"),
        ([], [(53, "17.60000000")], "mean_motion"),
        ([], [(53, " 0.00000000")], "mean_motion"),
        ([], [(27, "       ")], "eccentricity"),
        ([], [(27, "00e0001")], "eccentricity"),
        ([(54, "X30074-3")], [], "bstar"),
        ([(54, "130074-3")], [], "bstar"),
        ([(45, "x00000-0")], [], "mean_motion_ddot"),
    ],
)
def test_element_lines_with_a_right_checksum_and_a_false_value(one, two, field):
    parsed = read(tle(7) + tle(8, one=one, two=two) + tle(9))
    assert parsed.elements["sat_no"].to_list() == [7, 9]
    (row,) = parsed.rejected.to_dicts()
    assert (row["line_number"], row["sat_no"], row["reason"], row["field"]) == (3, 8, "field", field)


def test_years_of_both_centuries_and_leap_days():
    years = {"57001.00000000": 1957, "99365.00000000": 1999, "00366.00000000": 2000, "56366.00000000": 2056}
    text = "".join(tle(n, one=[(19, epoch)]) for n, epoch in enumerate(years, start=1))
    parsed = read(text)
    assert parsed.elements["epoch"].dt.year().to_list() == list(years.values())
    assert read(tle(1, one=[(19, "24366.50000000")])).elements["epoch"][0] == datetime(
        2024, 12, 31, 12, tzinfo=UTC
    )


def test_only_sgp4_elements_become_element_sets():
    types = "".join(tle(n, one=[(63, str(n))]) for n in range(1, 10))
    assert read(types).elements.height == 0
    parsed = read(types + tle(20, one=[(63, " ")]))
    assert parsed.elements["sat_no"].to_list() == [20]
    assert parsed.rejected["reason"].unique().to_list() == ["ephemeris_type"]
    assert "SGP4-XP" in parsed.rejected["message"][3]


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_what_may_be_absent(encode):
    few = {
        k: v for k, v in OMM.items() if k not in ("BSTAR", "REV_AT_EPOCH", "EPHEMERIS_TYPE", "OBJECT_NAME")
    }
    (row,) = read(encode(few | {"OBJECT_ID": ""})).elements.to_dicts()
    assert (row["bstar"], row["rev_at_epoch"], row["ephemeris_type"]) == (0.0, 0, 0)
    assert (row["object_name"], row["object_id"]) == (None, None)


def test_csv_columns_in_any_order_and_quoted():
    names = [*reversed(OMM), "NOBODY_KNOWS"]
    rows = [number(n, NOBODY_KNOWS="x", OBJECT_NAME='A, "B"') for n in (900_000_001, 2)]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    elements = read(out.getvalue()).elements
    assert elements["sat_no"].to_list() == [2, 900_000_001]
    assert elements["object_name"].to_list() == ['A, "B"'] * 2
    assert elements["mean_anomaly"].to_list() == [3.0, 3.0]


@pytest.mark.parametrize("keep", range(1, 17))
def test_a_cut_last_csv_row(keep):
    text = as_csv(number(7), number(8), number(9))
    cut = ",".join(text.splitlines()[-1].split(",")[:keep])
    parsed = read(text[: text.rindex("NEW ONE")] + cut)
    assert parsed.elements["sat_no"].to_list() == [7, 8]
    (row,) = parsed.rejected.to_dicts()
    assert (row["line_number"], row["reason"], row["raw_text"]) == (4, "truncated", cut)
    assert f"{keep} fields, the header has 17" in row["message"]


def test_an_open_quote_harms_no_neighbour():
    text = as_csv(number(7), number(8), number(9)).splitlines()
    text[2] = text[2].replace("NEW ONE", '"NEW ONE')
    parsed = read("\n".join(text))
    assert parsed.elements["sat_no"].to_list() == [7, 9]
    assert parsed.rejected.select("line_number", "reason").rows() == [(3, "truncated")]


def test_kvn_that_begins_with_comments_and_one_without_sense():
    text = "COMMENT from = somebody\n\nCOMMENT\n" + as_kvn(number(7), number(8), number(9))
    assert read(text).elements["sat_no"].to_list() == [7, 8, 9]
    assert read("COMMENT a\nCREATION_DATE = x\n" + as_kvn(number(7))).elements.height == 1
    parsed = read(text.replace("NORAD_CAT_ID = 8", "NORAD_CAT_ID = 8\nnonsense here"))
    assert parsed.elements["sat_no"].to_list() == [7, 9]
    (row,) = parsed.rejected.to_dicts()
    assert (row["sat_no"], row["reason"]) == (8, "truncated")
    assert "is not a valid keyword = value line" in row["message"]
    with raising(UnreadableCatalogueError, "CCSDS_OMM_VERS"):
        read("EPOCH = 2026-08-08T00:00:00\n")


@pytest.mark.parametrize(("prefix", "namespace"), [("", ""), ("", "urn:ccsds"), ("ndm", "urn:ccsds")])
def test_xml_with_any_namespace_and_the_lines_of_its_messages(prefix, namespace):
    parsed = read(as_xml(number(7), number(8, EPOCH="?"), number(9), prefix=prefix, namespace=namespace))
    assert parsed.elements.select("sat_no", "line_number").rows() == [(7, 3), (9, 5)]
    assert parsed.rejected["line_number"].to_list() == [4]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "le", "be"])
@pytest.mark.parametrize("text", [tle(7) + tle(9), *(e(number(7), number(9)) for e in ENCODINGS.values())])
def test_every_encoding_of_text_and_every_ending_of_lines(text, encoding, ending):
    changed = text.replace("\n", ending)
    marks = {"le": b"\xff\xfe", "be": b"\xfe\xff"}
    content = (
        marks[encoding] + changed.encode(f"utf-16-{encoding}")
        if encoding in marks
        else changed.encode(encoding)
    )
    parsed = read_catalogue(content, "test")
    assert parsed.elements.equals(read(text).elements)
    assert (parsed.elements.height, parsed.rejected.height) == (2, 0)


def test_kvn_drops_units_and_keeps_brackets_of_names():
    text = as_kvn(number(7, OBJECT_NAME="STARLINK-1 [+]"))
    lines = [f"{line} [unit]" if line.startswith("MEAN_MOTION =") else line for line in text.split("\n")]
    (row,) = read("\n".join(lines)).elements.to_dicts()
    assert (row["object_name"], row["mean_motion"]) == ("STARLINK-1 [+]", float(OMM["MEAN_MOTION"]))


def test_every_digit_is_kept():
    digits = {"MEAN_MOTION": "15.50103472123456", "BSTAR": "-.11606E-4", "ECCENTRICITY": ".0001234567890123"}
    for encode in ENCODINGS.values():
        (row,) = read(encode(number(999_999_999, **digits))).elements.to_dicts()
        assert row["sat_no"] == 999_999_999
        for keyword, text in digits.items():
            assert row[keyword.lower()] == float(text)


@pytest.mark.parametrize("encode", [as_csv, as_xml], ids=["csv", "xml"])
def test_another_library_reads_the_same_of_csv_and_xml(encode):
    elements = simulated_elements(seed=5, objects=40, epoch=REFERENCE_EPOCH)
    messages = [
        {k: v for k, v in m.items() if v is not None}
        for m in json.loads(format_omm_json(elements.with_columns(sat_no=pl.col("sat_no") % 90_000)))
    ]
    text = encode(*messages)
    ours = {row["sat_no"]: row for row in read(text).elements.to_dicts()}
    parse = reference.parse_csv if encode is as_csv else reference.parse_xml
    theirs = list(parse(io.StringIO(text)))
    assert len(theirs) == len(ours) == 40
    for fields in theirs:
        satellite = Satrec()
        reference.initialize(satellite, fields)
        row = ours[satellite.satnum]
        assert row["bstar"] == satellite.bstar
        assert row["eccentricity"] == satellite.ecco
        assert row["inclination"] == pytest.approx(float(fields["INCLINATION"]), abs=0)
        assert row["epoch"].replace(tzinfo=None) == datetime.fromisoformat(fields["EPOCH"])


def test_epochs_of_the_future_do_not_compete():
    now = datetime(2026, 8, 8, tzinfo=UTC)
    ahead = [now + timedelta(days=d) for d in (-1, 1.99, 2.01, 300)]
    text = json.dumps([number(7 if n else 8, EPOCH=f"{e:%Y-%m-%dT%H:%M:%S}") for n, e in enumerate(ahead)])
    parsed = read_catalogue(text.encode(), "test", collected_at=now)
    assert dict(parsed.elements.select("sat_no", "epoch").iter_rows()) == {7: ahead[1], 8: ahead[0]}
    assert parsed.rejected.select("line_number", "reason", "field").rows() == [
        (3, "future_epoch", "epoch"),
        (4, "future_epoch", "epoch"),
    ]
    assert "2 days after the file's collection at 2026-08-08T00:00:00Z" in parsed.rejected["message"][0]


# -- limits ----------------------------------------------------------------------------------------------


def test_a_gzip_bomb_ends_at_the_limit():
    bomb = gzip.compress(gzip.compress(b" " * (64 << 20)) * 1)
    inner = gzip.decompress(bomb)
    assert len(inner) < 100_000
    tracemalloc.start()
    try:
        with raising(TooLargeCatalogueError, "max_unpacked_mb", source="bomb.gz"):
            read_catalogue(inner, "bomb.gz", limits=ReadLimits(max_bytes=4 << 20))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    many = gzip.compress(b"") * 50_000 + gzip.compress((L1 + "\n" + L2).encode())
    assert read_catalogue(many, "members.gz").elements.height == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "<a>" * 10_000,
        "<a>" * 100 + "</a>" * 100,
        '<!DOCTYPE n [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><ndm>&b;</ndm>',
        '<?xml version="1.0"?><!DOCTYPE ndm SYSTEM "file:///etc/passwd"><ndm/>',
        "<ndm>&undefined;</ndm>",
    ],
    ids=["open", "closed", "objects", "xml-open", "xml-deep", "entities", "external", "undefined"],
)
def test_nesting_and_expansion_are_refused_with_a_reason(text):
    with raising(UnreadableCatalogueError, source="test") as refused:
        read(text)
    assert refused.value.problem
    assert refused.value.remedy


def test_a_record_without_end_is_cut_in_what_is_kept_of_it():
    for text in (
        "x" * 3_000_000,
        as_csv(number(7)) + "y" * 3_000_000,
        as_kvn(number(7) | {"Q": "z" * 3_000_000}),
    ):
        (row,) = read(text).rejected.to_dicts()
        assert len(row["raw_text"]) <= 4_096
        assert row["reason"] in ("orphan_line", "record_length")
    (row,) = read(as_xml(number(7, OBJECT_NAME="n" * 100_000))).rejected.to_dicts()
    assert row["reason"] == "record_length"


@pytest.mark.parametrize("value", ["\ud800", "x\udfff", {"a": 1}, ["\ud800"]])
@pytest.mark.parametrize("name", ["OBJECT_NAME", "MEAN_MOTION"])
def test_a_value_of_json_that_no_text_can_hold_rejects_its_record_alone(name, value):
    parsed = read(json.dumps([number(7), number(8, **{name: value}), number(9)]))
    assert parsed.elements["sat_no"].to_list() == [7, 9]
    (row,) = parsed.rejected.to_dicts()
    assert (row["line_number"], row["reason"]) == (2, "unsupported_message")
    assert json.loads(row["raw_text"])["NORAD_CAT_ID"] == "8"


@pytest.mark.long
def test_a_large_file_costs_a_bounded_multiple_of_itself():
    elements = simulated_elements(seed=5, objects=20_000, epoch=REFERENCE_EPOCH)
    block = format_tle(elements.with_columns(sat_no=pl.col("sat_no") % 300_000))
    content = (block * 6).encode()  # 18 MB, of which five sixths are duplicates
    assert len(content) > 18_000_000
    parsed = read_catalogue(content, "large.tle")
    assert parsed.elements.height == 20_000
    assert parsed.rejected["reason"].unique().to_list() == ["duplicate_object"]
    assert parsed.rejected.height == 100_000


# -- whatever comes --------------------------------------------------------------------------------------

WHOLE = [tle(7) + tle(8), *(e(number(7), number(8)) for e in ENCODINGS.values())]
DAMAGE = st.tuples(st.integers(0, 2_000), st.integers(0, 60), st.text(max_size=8))


@pytest.mark.long
@seed(20261122)
@settings(max_examples=400 if soaking() else 150)
@given(st.sampled_from(WHOLE), st.lists(DAMAGE, min_size=1, max_size=4))
def test_damaged_text_is_read_or_refused_by_type(text, damage):
    for at, gone, put in damage:
        text = text[:at] + put + text[at + gone :]
    try:
        parsed = read_catalogue(text.encode(errors="surrogatepass"), "fuzz")
    except CatalogueError:
        return
    for row in parsed.elements.to_dicts():
        assert 0 < row["mean_motion"] <= 17.5
        assert 0 <= row["eccentricity"] < 1
        assert abs(row["bstar"]) <= 10
    assert parsed.rejected["reason"].null_count() == 0
    assert parsed.rejected["message"].null_count() == 0


@seed(20261122)
@settings(max_examples=200)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\x1f\x8b\x08", b"\xff\xfe", b"[", b"<", b"1 ", b"EPOCH,NORAD_CAT_ID\n"]),
)
def test_bytes_of_any_kind_are_read_or_refused_by_type(content, start):
    with contextlib.suppress(CatalogueError):
        read_catalogue(start + content, "fuzz")


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_real_snapshots_cut_anywhere_lose_no_whole_record():
    content = gzip.decompress(min(SNAPSHOTS.glob("active-*.tle.gz")).read_bytes())[:200_000]
    whole = set(read_catalogue(content, "whole").elements["sat_no"])
    for at in range(100_000, 100_400, 7):
        cut = read_catalogue(content[:at], "cut")
        assert set(cut.elements["sat_no"]) <= whole
        # A set is three lines of at most 168 characters: what is lost is the last one.
        assert cut.elements.height >= content[:at].count(b"\n2 ") - 1
        assert cut.rejected.height <= 3
