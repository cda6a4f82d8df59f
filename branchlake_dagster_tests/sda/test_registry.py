"""One catalogue out of many: the same whatever order pulls come in, and however often."""

import json
import random
from datetime import date, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.records import CatalogueError
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.registry.life_cycle import (
    OBJECT_COLUMNS,
    STATES,
    LatestSightings,
    update_objects,
)
from branchlake_dagster.sda.registry.merge import PULLED_COLUMNS, SET_KEY, merge_pulled_sets, select_new_sets
from branchlake_dagster.sda.registry.satcat import ENTRY_COLUMNS, build_validity_periods, read_satcat
from branchlake_dagster.sda.registry.sources import SOURCES, feed_name, source_name
from branchlake_dagster.sda.sources import snapshot_time
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS
from branchlake_dagster_tests.suite.soak import soaking

OBJECT_STEP = 1 if soaking() else 16
"""Real catalogs are thinned out to each n-th object."""

BASE = simulated_elements(seed=2, objects=5, epoch=REFERENCE_EPOCH).with_columns(
    sat_no=pl.int_range(1, 6), bstar=pl.lit(0.0)
)
ENTRIES = pl.DataFrame(
    schema={"snapshot_id": pl.String(), **ENTRY_COLUMNS, "collected_at": pl.Datetime("us", "UTC")}
)


def at(hours: float) -> datetime:
    return REFERENCE_EPOCH + timedelta(hours=hours)


def pull(name: str, *rows: tuple[int, float, float], hours: float | None = None) -> pl.DataFrame:
    """A pull of objects by (number, epoch in hours, BSTAR), collected at the hour in its name."""
    hours = float(name.rsplit("-", 1)[1]) if hours is None else hours
    chosen = pl.DataFrame(
        {
            "sat_no": [r[0] for r in rows],
            "epoch": [at(r[1]) for r in rows],
            "bstar": [float(r[2]) for r in rows],
        },
        schema={"sat_no": pl.Int64, "epoch": pl.Datetime("us", "UTC"), "bstar": pl.Float64},
    )
    return (
        BASE.drop("epoch", "bstar")
        .join(chosen, on="sat_no")
        .with_columns(
            snapshot_id=pl.lit(name),
            data_mode=pl.lit("REAL"),
            source=pl.lit(source_name(name)),
            collected_at=pl.lit(at(hours)),
        )
        .select(pl.col(c).cast(t) for c, t in PULLED_COLUMNS.items())
    )


def latest_sightings(objects: pl.DataFrame) -> LatestSightings:
    by_feed = objects.drop_nulls("feed").group_by("feed").agg(pl.col("last_seen").max())
    newest = objects.select(pl.max_horizontal(pl.col("last_seen", "satcat_at").max())).item()
    return LatestSightings(dict(by_feed.iter_rows()), newest)


class Registry:
    """The tables that runs keep, in memory: pulls by snapshot, catalogue, history, objects."""

    def __init__(self) -> None:
        self.pulls: dict[str, pl.DataFrame] = {}
        self.entries: dict[str, pl.DataFrame] = {}
        self.catalogue = pl.DataFrame(schema=PULLED_COLUMNS)
        self.history = pl.DataFrame(schema=PULLED_COLUMNS)
        self.objects = pl.DataFrame(schema=OBJECT_COLUMNS)
        self.looked_up = 0

    def take(self, *pulled: pl.DataFrame, entries: pl.DataFrame = ENTRIES) -> pl.DataFrame:
        rows = pl.concat([pl.DataFrame(schema=PULLED_COLUMNS), *pulled])
        self.pulls.update({one["snapshot_id"][0]: one for one in pulled if one.height})
        merged = merge_pulled_sets(self.catalogue, rows, rows["snapshot_id"].unique().to_list(), self.lookup)
        self.catalogue = merged.winners
        self.history = pl.concat([self.history, select_new_sets(self.history, rows)])
        updated = update_objects(self.objects, merged.winners, rows, entries, LatestSightings({}, None))
        latest = latest_sightings(updated)
        self.objects = update_objects(self.objects, merged.winners, rows, entries, latest)
        self.looked_up += merged.uncertain_sat_nos.len()
        return merged.audit

    def lookup(self, objects: pl.Series) -> pl.DataFrame:
        return pl.concat(self.pulls.values()).filter(pl.col("sat_no").is_in(objects.implode()))


def outcome(audit: pl.DataFrame) -> list[tuple[int, str, bool]]:
    return audit.sort("sat_no").select("sat_no", "outcome", "conflict").rows()


def test_the_newest_epoch_wins_then_the_source_then_the_correction():
    registry = Registry()
    assert outcome(registry.take(pull("esa-10", (1, 5, 0.1), (2, 5, 0.1), (3, 5, 0.1)))) == [
        (1, "won", False), (2, "won", False), (3, "won", False),
    ]  # fmt: skip
    audit = registry.take(pull("leolabs-11", (1, 6, 0.2), (2, 4, 0.2), (3, 5, 0.2)))
    assert outcome(audit) == [(1, "won", False), (2, "older", False), (3, "outranked", True)]
    assert audit.filter(pl.col("sat_no") == 3)["winner_source"][0] == "ESA_SST"
    assert outcome(registry.take(pull("18sds-12", (3, 5, 0.3)))) == [(3, "won", False)]
    assert outcome(registry.take(pull("18sds-13", (3, 5, 0.4)))) == [(3, "won", False)], "a correction"
    assert outcome(registry.take(pull("18sds-14", (3, 5, 0.3)))) == [(3, "superseded", True)], (
        "not brought back"
    )
    assert outcome(registry.take(pull("18sds-15", (3, 5, 0.4)))) == [(3, "repeated", False)]
    won = dict(registry.catalogue.select("sat_no", "snapshot_id").iter_rows())
    assert won == {1: "leolabs-11", 2: "esa-10", 3: "18sds-13"}


def test_a_corrected_pull_replaces_the_rows_of_the_first():
    registry = Registry()
    registry.take(pull("a-1", (1, 0, 0.1), (2, 0, 0.1)))
    registry.take(pull("a-2", (1, 1, 0.2), (2, 1, 0.2), (3, 1, 0.2)))
    registry.take(pull("a-2", (1, 1, 0.9), (3, 0.5, 0.2)))
    told = registry.catalogue.select("sat_no", "snapshot_id", "bstar").rows()
    assert told == [(1, "a-2", 0.9), (2, "a-1", 0.1), (3, "a-2", 0.2)]
    assert registry.catalogue["epoch"].to_list() == [at(1), at(0), at(0.5)]


def test_an_object_frozen_by_an_epoch_of_the_future_is_freed():
    registry = Registry()
    registry.catalogue = pull("a-1", (1, 1_000, 0.1), (2, 1_000, 0.1))  # as a table of before has it
    registry.take(pull("a-2", (1, 1, 0.2)))
    assert registry.catalogue.select("sat_no", "snapshot_id").rows() == [(1, "a-2"), (2, "a-1")]
    states = dict(registry.objects.select("sat_no", "state").iter_rows())
    assert states == {1: "tracked", 2: "invalid"}
    registry.take(pull("a-3", (1, 500, 0.2)))
    assert registry.catalogue["epoch"][0] == at(1), "nor does a new one compete"


EPOCH = st.integers(0, 6)
ROW = st.tuples(st.integers(1, 5), EPOCH, st.integers(0, 2))
PULLS = st.lists(
    st.tuples(
        st.sampled_from(["18sds", "esa", "numerica", "active"]),
        st.integers(0, 8),
        st.lists(ROW, max_size=4, unique_by=lambda r: r[0]),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda p: (p[0], p[1]),
)


@pytest.mark.long
@seed(20261122)
@settings(max_examples=60 if soaking() else 15)
@given(PULLS, st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_any_repetition_and_any_grouping_gives_the_same(pulls, chance, together):
    made = [pull(f"{who}-{hours}", *rows) for who, hours, rows in pulls]
    straight = Registry()
    for one in made:
        straight.take(one)
    again = made * 2
    chance.shuffle(again)
    other = Registry()
    for k in range(0, len(again), together):
        # A run takes a pull once.
        batch = {one["snapshot_id"][0]: one for one in again[k : k + together] if one.height}
        other.take(*batch.values())
    assert other.catalogue.equals(straight.catalogue)
    assert other.objects.equals(straight.objects)
    sets = [r.history.select(SET_KEY).sort(SET_KEY) for r in (straight, other)]
    assert sets[0].equals(sets[1])
    assert sets[0].n_unique() == sets[0].height
    # By the rules as they are written down, row by row.
    for number, rows in pl.concat(made).partition_by("sat_no", as_dict=True).items():
        (won,) = straight.catalogue.filter(pl.col("sat_no") == number[0]).to_dicts()
        listed = rows.to_dicts()
        newest = max(r["epoch"] for r in listed)
        ranked = [r for r in listed if r["epoch"] == newest]
        best = min(SOURCES.index(r["source"]) for r in ranked)
        first: dict[float, tuple] = {}
        for r in ranked:
            if SOURCES.index(r["source"]) == best:
                key = (r["collected_at"], r["snapshot_id"])
                first[r["bstar"]] = min(first.get(r["bstar"], key), key)
        wanted = max((when, bstar) for bstar, when in first.items())
        assert ((won["collected_at"], won["snapshot_id"]), won["bstar"]) == wanted


# -- the life of an object -------------------------------------------------------------------------------


def entry(snapshot: str, hours: float, **facts) -> pl.DataFrame:
    row = dict.fromkeys(ENTRY_COLUMNS) | {"sat_no": 1, "owner": "US"} | facts
    return pl.DataFrame([{"snapshot_id": snapshot, **row, "collected_at": at(hours)}], schema=ENTRIES.schema)


def states(registry: Registry) -> dict[int, str]:
    return dict(registry.objects.select("sat_no", "state").iter_rows())


def test_stale_gone_and_back():
    def day(feed: str, hours: int, *rows):
        return pull(f"{feed}-{at(hours):%Y%m%dT%H%M}Z", *rows, hours=hours)

    registry = Registry()
    registry.take(day("a", 0, (1, 0, 0), (2, 0, 0), (3, -24 * 31, 0)))
    assert states(registry) == {1: "tracked", 2: "tracked", 3: "stale"}
    registry.take(day("a", 48, (1, 40, 0)))
    assert states(registry)[2] == "tracked", "two days are no loss"
    registry.take(day("a", 96, (1, 90, 0)))
    assert states(registry)[2] == "stale"
    (two,) = registry.objects.filter(pl.col("sat_no") == 2).to_dicts()
    assert (two["first_seen"], two["last_seen"], two["feed"]) == (at(0), at(0), "a")
    registry.take(day("b", 200, (4, 199, 0)))
    assert states(registry)[1] == "tracked", "another feed's pull says nothing of it"
    registry.take(day("a", 97, (2, 50, 0)))
    assert states(registry)[2] == "tracked"


def test_a_decay_is_a_tombstone_that_no_older_record_raises():
    registry = Registry()
    registry.take(pull("a-0", (1, 0, 0), (2, 0, 0)))
    fallen = entry("satcat-10", 10, decay_date=date(2026, 8, 8))
    registry.take(entries=fallen)
    assert states(registry) == {1: "decayed", 2: "tracked"}
    registry.take(pull("a-12", (1, 12, 0), (2, 11, 0)))
    registry.take(pull("old-1", (1, -50, 0)))
    registry.take(entries=entry("satcat-5", 5))  # an older catalogue, which did not know it yet
    assert states(registry)[1] == "decayed"
    registry.take(pull("a-60", (1, 59, 0)))
    assert states(registry)[1] == "tracked", "elements of two days later say that it flies"
    registry.take(entries=entry("satcat-70", 70, sat_no=9))
    assert states(registry)[9] == "untracked"


@pytest.mark.long
@seed(20261122)
@settings(max_examples=25 if soaking() else 12)
@given(
    PULLS,
    st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=3, unique_by=lambda t: t[0]),
    st.randoms(use_true_random=False),
)
def test_the_states_do_not_depend_on_the_order_either(pulls, catalogues, chance):
    steps = [(pull(f"{who}-{hours}", *rows), ENTRIES) for who, hours, rows in pulls]
    steps += [
        (pull("x-0"), entry(f"satcat-{h}", h, decay_date=REFERENCE_EPOCH.date() if fell else None))
        for h, fell in catalogues
    ]
    results = []
    for _ in range(2):
        registry = Registry()
        for pulled, entries in steps:
            registry.take(pulled, entries=entries)
        results.append(registry.objects)
        steps = steps * 2
        chance.shuffle(steps)
    assert results[0].equals(results[1])
    assert set(results[0]["state"]) <= set(STATES)


def test_sources_and_feeds_are_read_from_snapshot_ids():
    assert [source_name(n) for n in ("celestrak-active-20260808T0220Z", "ESA-x", "numerica_1", "active-1", "sim-bad")] == [
        "18SDS", "ESA_SST", "NUMERICA", "18SDS", "SIMULATED",
    ]  # fmt: skip
    assert feed_name("celestrak-active-20260808T0220Z") == "celestrak-active"
    assert feed_name("debris-20260822") == "debris"
    assert feed_name("20260822") == "unnamed"


# -- the satellite catalogue -----------------------------------------------------------------------------


def read(text: str):
    return read_satcat(text.encode(), "test", ReadLimits())


def test_satellite_catalogs_of_three_shapes_give_the_same_rows():
    names = "OBJECT_NAME,OBJECT_ID,NORAD_CAT_ID,OBJECT_TYPE,OWNER,LAUNCH_DATE,DECAY_DATE,PERIOD,RCS"
    text = f"{names}\nVANGUARD 1,1958-002B,5,PAY,US,1958-03-17,,132.59,0.1220\n"
    row = dict(zip(names.split(","), text.splitlines()[1].split(","), strict=True))
    short = {
        "n": "VANGUARD 1",
        "c": 5,
        "i": "1958-002B",
        "t": "PAY",
        "o": "US",
        "ld": "1958-03-17",
        "dd": "",
        "p": "132.59",
        "rcs": 0.122,
    }
    found = [read(text)[0], read(json.dumps([row]))[0], read(json.dumps([short]))[0]]
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])
    assert found[0].row(0, named=True)["launch_date"] == date(1958, 3, 17)


def test_entries_that_cannot_be_read_are_rejected_one_by_one():
    rows = [
        {"NORAD_CAT_ID": n, "OBJECT_NAME": "x", "DECAY_DATE": d}
        for n, d in ((5, ""), (6, "soon"), ("", ""), (7, "2026-08-01"))
    ]
    entries, rejected = read(json.dumps(rows))
    assert entries["sat_no"].to_list() == [5, 7]
    assert rejected.select("line_number", "reason", "field").rows() == [
        (2, "field", "decay_date"),
        (3, "catalogue_number", "sat_no"),
    ]
    for bad in ("[]", "[{}]", "a,b\n1,2\n", '{"a": [', "x"):
        with pytest.raises(CatalogueError):
            read(bad)


def test_a_cut_row_is_rejected_and_not_read_as_an_object_that_still_flies():
    text = 'OBJECT_NAME,NORAD_CAT_ID,OWNER,DECAY_DATE\nA,5,US,2020-01-01\nB,6,U\n\nC,7,US,\nD,8,"US,2020-01-01\nE,9'
    entries, rejected = read(text)
    assert entries.select("sat_no", "decay_date").rows() == [(5, date(2020, 1, 1)), (7, None)]
    assert rejected.select("line_number", "reason", "raw_text").rows() == [
        (3, "truncated", "B,6,U"),
        (6, "truncated", 'D,8,"US,2020-01-01'),
        (7, "truncated", "E,9"),
    ]


def test_a_record_of_json_that_cannot_be_an_entry_is_rejected_alone():
    rows = [
        {"NORAD_CAT_ID": 5, "OWNER": "US"},
        {"NORAD_CAT_ID": 6, "OWNER": "\ud800"},
        {"NORAD_CAT_ID": 7, "OWNER": {"country": "US"}},
        8,
        {"NORAD_CAT_ID": 9, "OWNER": None},
    ]
    entries, rejected = read(json.dumps(rows))
    assert entries["sat_no"].to_list() == [5, 9]
    assert rejected.select("line_number", "reason").rows() == [(n, "unsupported_message") for n in (2, 3, 4)]
    assert rejected["raw_text"].str.contains("NORAD_CAT_ID").to_list() == [True, True, False]


def test_columns_count_wherever_they_first_appear():
    rows = [{"NORAD_CAT_ID": n + 1, "OBJECT_NAME": "x"} for n in range(1_001)]
    rows[1_000] |= {"DECAY_DATE": "2020-01-01", "LAUNCH": "2019-01-01"}
    rows[5] = {"c": 6, "n": "y"}
    entries, rejected = read(json.dumps(rows))
    assert (entries.height, rejected.height) == (1_001, 0)
    assert entries.select("launch_date", "decay_date").row(1_000) == (date(2019, 1, 1), date(2020, 1, 1))
    assert entries.select("sat_no", "object_name").row(5) == (6, "y")


@pytest.mark.parametrize(
    "page",
    [
        "<html><body>sorry</body></html>",
        '{"error": "busy"}',
        '[{"error": "busy"}]',
        "No data",
        "\x1a\n",
        '"x"',
    ],
)
def test_a_page_in_place_of_a_satellite_catalog_is_an_error_of_the_file(page):
    with pytest.raises(CatalogueError) as caught:
        read(page)
    assert caught.value.source == "test"


def test_entries_are_dated_by_what_they_say_whatever_comes_first():
    owners = [(1, "US"), (2, "US"), (3, "UK"), (4, "US"), (5, "US")]
    rows = [entry(f"satcat-{h}", h, owner=o) for h, o in owners] + [entry("satcat-3", 3, sat_no=2)]
    expected = [
        (1, "US", at(1), at(3)),
        (1, "UK", at(3), at(4)),
        (1, "US", at(4), None),
        (2, "US", at(3), None),
    ]
    for k in range(5):
        random.Random(k).shuffle(rows)
        dated = build_validity_periods(pl.concat(rows))
        assert dated.select("sat_no", "owner", "valid_from", "valid_to").rows() == expected


# -- real catalogues -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_all_real_snapshots_in_order_shuffled_and_twice():
    made = []
    for path in sorted(SNAPSHOTS.glob("active-*.tle.gz")):
        name = path.name.removesuffix(".tle.gz")
        when = snapshot_time(name)
        elements = read_catalogue(path.read_bytes(), name, collected_at=when).elements
        elements = elements.filter(pl.col("sat_no") % OBJECT_STEP == 0)
        # Snapshots of different times stand for different providers.
        provider = ("celestrak", "esa", "leolabs")[len(made) % 3]
        made.append(
            elements.with_columns(
                snapshot_id=pl.lit(f"{provider}-{name}"), data_mode=pl.lit("REAL"),
                source=pl.lit(source_name(provider)), collected_at=pl.lit(when),
            ).select(pl.col(c).cast(t) for c, t in PULLED_COLUMNS.items())
        )  # fmt: skip
    assert len(made) == 22
    straight = Registry()
    for one in made:
        straight.take(one)
    again = made * 2
    random.Random(4).shuffle(again)
    other = Registry()
    for one in again:
        other.take(one)
    assert other.catalogue.equals(straight.catalogue)
    assert other.objects.equals(straight.objects)
    assert straight.catalogue.height == straight.objects.height > 16_000 // OBJECT_STEP
    counts = dict(straight.objects.group_by("state").len().iter_rows())
    # What left the catalogue between June and August is known as such.
    assert counts["stale"] > 100 // OBJECT_STEP
    assert counts["tracked"] > 16_000 // OBJECT_STEP
    entries, rejected = read_satcat(
        (SNAPSHOTS / "satcat-active-20260822.json.gz").read_bytes(), "satcat", ReadLimits()
    )
    assert (entries.height, rejected.height) == (19_894, 0)
