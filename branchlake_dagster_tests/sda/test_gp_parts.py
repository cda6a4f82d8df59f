"""Files that are divided have the records of the whole file, in this process and on Spark's workers."""

import gzip

import polars as pl
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.parts import divide_text
from branchlake_dagster.sda.gp.read import GpFormat, detect_format, parse_records, read_catalogue
from branchlake_dagster.sda.gp.records import CatalogueError, EmptyCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH
from branchlake_dagster.sda.pulls.distributed import parse_pulls
from branchlake_dagster.sda.registry.satcat import read_satcat
from branchlake_dagster.sda.sources import GpFile
from branchlake_dagster_tests.sda.test_gp import L1, L2, NAME, SNAPSHOTS, signed
from branchlake_dagster_tests.sda.test_gp_records import DAMAGE, ENCODINGS, number, tle
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.suite.soak import soaking

LIMITS = ReadLimits()
WHOLE = [
    "".join(tle(k) for k in range(7, 12)),
    *(encode(*(number(k) for k in range(7, 12))) for encode in ENCODINGS.values()),
]
SEED = 20261127


def parse(text: str, part_chars: int) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """The candidates and the rejected rows of all parts; None if a part cannot be read."""
    file_format = detect_format(text)
    try:
        parsed = [
            parse_records(part.text, file_format, "parts", LIMITS, first_line=part.first_line)
            for part in divide_text(text, file_format, part_chars)
        ]
    except CatalogueError:
        return None
    candidates, rejected = (pl.concat(frames) for frames in zip(*parsed, strict=True))
    return candidates.sort("line_number"), rejected.sort(rejected.columns)


def same_records(text: str, part_chars: int) -> None:
    divided, whole = parse(text, part_chars), parse(text, len(text) + 1)
    assert (divided is None) is (whole is None)
    if divided is not None and whole is not None:
        assert all(one.equals(other) for one, other in zip(divided, whole, strict=True))


@pytest.mark.parametrize("text", WHOLE, ids=["tle", *ENCODINGS])
def test_parts_of_every_length_have_the_records_of_the_file(text):
    file_format = detect_format(text)
    divisible = file_format not in (GpFormat.JSON, GpFormat.XML)
    assert (len(divide_text(text, file_format, 100)) > 2) is divisible
    for part_chars in (1, 37, 100, 500, 2_000):
        same_records(text, part_chars)


@pytest.mark.long
@seed(SEED)
@settings(max_examples=150 if soaking() else 60)
@given(st.sampled_from(WHOLE), st.lists(DAMAGE, min_size=1, max_size=4), st.integers(1, 900))
def test_parts_of_damaged_files_have_the_records_of_the_file(text, damage, part_chars):
    for at, gone, put in damage:
        text = text[:at] + put + text[at + gone :]
    content = text.encode(errors="surrogatepass")
    same_records(decode_gp_file(content, "damaged", LIMITS), part_chars)


def test_a_preamble_belongs_to_the_first_message_and_blank_lines_to_the_header():
    kvn = ENCODINGS["kvn"](number(7), number(8))
    same_records("COMMENT from somebody\n" * 50 + kvn, 10)
    csv = ENCODINGS["csv"](number(7), number(8))
    same_records("\n \n\n" + csv.replace("\n", "\n\n"), 10)


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
@pytest.mark.parametrize("name", ["active-20260811T0735Z.tle.gz", "on-orbit-20241101.omm.csv.gz"])
def test_parts_of_real_files_have_the_records_of_the_file(name):
    text = decode_gp_file((SNAPSHOTS / name).read_bytes(), name, LIMITS)
    same_records(text, 300_000)


# -- on workers ------------------------------------------------------------------------------------------


def file_of(content: bytes, name: str, mode: str = "REAL") -> GpFile:
    return GpFile(content, name, mode, REFERENCE_EPOCH)


def rows_of(frame, by: list[str]) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(frame.toArrow())).sort(by)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_workers_give_the_rows_of_whole_files_of_every_format(spark_session):
    later, future = (signed(L1.replace("26219.8349", day)) for day in ("26219.9349", "26300.0000"))
    doubled = "".join(tle(k) for k in range(10, 40)) + f"{later}\n{L2}\n{NAME}\n{L1}\n{L2}\n"
    texts = {
        "doubled": doubled + f"{future}\n{L2}\nGARBAGE\n",
        **{name: encode(*(number(k) for k in range(7, 12))) for name, encode in ENCODINGS.items()},
    }
    files = [(name, file_of(gzip.compress(text.encode()), f"{name}.gz")) for name, text in texts.items()]
    satcat = b"NORAD_CAT_ID,OWNER,DECAY_DATE\n7,US,2026-08-08\n8,UK,\nx,US,\n7,FR,\n"
    files += [("satcat-1", file_of(satcat, "satcat.csv")), ("esa-1", file_of(texts["doubled"].encode(), "e"))]
    with parse_pulls(spark_session, files, LIMITS, part_chars=200) as rows:
        sets = rows_of(rows.element_sets, ["snapshot_id", "sat_no"])
        rejected = rows_of(rows.rejected_records, ["snapshot_id", "line_number", "reason"])
        entries = rows_of(rows.satellite_entries, ["sat_no"])
        counts = rows.element_set_count, sum(rows.reasons.values()), rows.entry_count
        assert rows.reasons.keys() >= {"duplicate_object", "future_epoch", "orphan_line", "catalogue_number"}
    assert counts == (sets.height, rejected.height, entries.height)
    for name, file in files:
        if name == "satcat-1":
            wanted_entries, wanted_rejected = read_satcat(file.content, file.source, LIMITS)
            assert entries.select(wanted_entries.columns).equals(wanted_entries)
        else:
            parsed = read_catalogue(file.content, file.source, collected_at=file.collected_at)
            wanted_rejected = parsed.rejected
            mine = sets.filter(snapshot_id=name)
            assert mine.select(parsed.elements.columns).equals(parsed.elements)
            assert mine["source"].unique().to_list() == ["ESA_SST" if name == "esa-1" else "18SDS"]
            assert mine["collected_at"].unique().to_list() == [REFERENCE_EPOCH]
        found = rejected.filter(snapshot_id=name).select(wanted_rejected.columns)
        assert found.equals(wanted_rejected.sort("line_number", "reason"))
    assert set(sets["data_mode"]) == {"REAL"}


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_file_that_workers_cannot_read_is_the_error_of_its_type(spark_session):
    good = ("good", file_of(f"{L1}\n{L2}\n".encode(), "good.tle"))
    for content, error, name in (
        (b"[{", UnreadableCatalogueError, "bad"),
        (b"\n\n", EmptyCatalogueError, "bad"),
        (b"[]", EmptyCatalogueError, "satcat-bad"),
    ):
        files = [good, (name, file_of(content, "bad.json"))]
        with raising(error, source="bad.json"), parse_pulls(spark_session, files, LIMITS):
            pass
