"""The registry on Spark's workers has the rows of the reference after every pull of a history."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import WorkerTable
from branchlake_dagster.errors import Unsupported
from branchlake_dagster.internals.pyiceberg import commit_files
from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.registry.distributed import (
    AUDIT_ROWS,
    CATALOGUE_ROWS,
    COLUMNS_OF_TABLE,
    CURRENT,
    ENTRIES,
    HISTORY,
    HISTORY_ROWS,
    OBJECT_ROWS,
    OBJECTS_BEFORE,
    PULLED,
    PulledSnapshots,
    dump_sightings,
    load_sightings,
    merge_pulls,
)
from branchlake_dagster.sda.registry.life_cycle import OBJECT_COLUMNS, STATES, LatestSightings
from branchlake_dagster.sda.registry.merge import (
    CATALOGUE_COLUMNS,
    OUTCOMES,
    PULLED_COLUMNS,
    SET_KEY,
)
from branchlake_dagster.sda.registry.periods import DATED_ENTRY_COLUMNS, arrow_schema
from branchlake_dagster.sda.registry.satcat import read_satcat
from branchlake_dagster.sda.registry.sources import source_name
from branchlake_dagster.sda.registry.table_files import (
    delete_files,
    find_foreign_columns,
    list_files,
    open_table,
)
from branchlake_dagster.sda.sources import snapshot_time
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.sda import registry_reference as reference
from branchlake_dagster_tests.sda.test_gp import SNAPSHOTS
from branchlake_dagster_tests.suite.soak import soaking

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

NO_ENTRIES = pl.DataFrame(schema=DATED_ENTRY_COLUMNS)
SEEDS = (20261137, 20261139, 20261155) if soaking() else (20261155,)
REAL_PULLS, OBJECT_STEP = (22, 1) if soaking() else (3, 8)
"""Real snapshots that are merged, and each of how many of their 16,000 objects."""


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


@pytest.fixture
def catalog(tmp_path):
    made = InMemoryCatalog("registry", warehouse=tmp_path.as_uri())
    made.create_namespace("sda")
    yield made
    made.close()


class SparkRegistry:
    """The registry's tables in files of their own; each run is computed and written by Spark's workers."""

    def __init__(self, session: SparkSession, catalog: InMemoryCatalog, folder: Path) -> None:
        self.session = session
        self.folder = folder
        self.pulls: dict[str, pl.DataFrame] = {}
        self.looked_up = 0
        self.repetitions = 0
        self.latest: LatestSightings | None = None
        self.tables = {
            name: open_table(
                catalog,
                ("sda", f"{name}_{uuid.uuid4().hex}"),
                arrow_schema(columns),
                "snapshot_id" if name == AUDIT_ROWS else None,
            )
            for name, columns in COLUMNS_OF_TABLE.items()
        }

    def worker_tables(self) -> dict[str, WorkerTable]:
        return {
            name: WorkerTable(table.metadata.model_dump_json(), table.io.properties)
            for name, table in self.tables.items()
        }

    def take(self, pulled: pl.DataFrame, entries: pl.DataFrame = NO_ENTRIES) -> None:
        """Merge pulls as a run does."""
        for (name,), rows in pulled.partition_by("snapshot_id", as_dict=True).items():
            self.pulls[str(name)] = rows
        before = {name: self.rows(name) for name in COLUMNS_OF_TABLE}
        first_epoch = pulled["epoch"].min() if pulled.height else None
        known = before[HISTORY_ROWS].select(SET_KEY)
        inputs = {
            PULLED: pulled,
            ENTRIES: entries,
            CURRENT: before[CATALOGUE_ROWS],
            OBJECTS_BEFORE: before[OBJECT_ROWS],
            HISTORY: known if first_epoch is None else known.filter(pl.col("epoch") >= first_epoch),
        }
        collected_at = dict(pulled.group_by("snapshot_id").agg(pl.col("collected_at").max()).iter_rows())
        report = merge_pulls(
            {name: self.frame(rows) for name, rows in inputs.items()},
            PulledSnapshots(collected_at, entries["collected_at"].max()),
            self.worker_tables(),
            lambda: self.frame(pl.concat(self.pulls.values())),
            # Every other run does not know them.
            self.latest if len(self.pulls) % 2 else None,
        )
        self.latest = load_sightings(dump_sightings(report.latest))
        for name, table in self.tables.items():
            whole = name in (CATALOGUE_ROWS, OBJECT_ROWS)
            removed = list_files(table) if whole else []
            if name == AUDIT_ROWS and collected_at:
                removed = list_files(table, "snapshot_id", list(collected_at))
            if removed or report.files[name]:
                commit_files(table, added=report.files[name], removed=removed, properties={})
        self.looked_up += report.looked_up
        self.repetitions += bool(report.unused_files)
        # The counts decide what a run commits.
        for count, name in (("changed_sets", CATALOGUE_ROWS), ("changed_objects", OBJECT_ROWS)):
            after = self.rows(name)
            changed = after.join(before[name], on=after.columns, how="anti", nulls_equal=True)
            assert report.counts[count] == changed.height
        lost = before[CATALOGUE_ROWS].join(self.rows(CATALOGUE_ROWS), on="sat_no", how="anti")
        assert report.counts["withdrawn_sets"] == lost.height
        assert report.counts["pulled"] == pulled.height
        assert sum(report.counts_of("outcome").values()) == pulled.height
        assert sum(report.counts_of("state").values()) == self.rows(OBJECT_ROWS).height

    def rows(self, name: str) -> pl.DataFrame:
        table = pl.DataFrame(pl.from_arrow(self.tables[name].scan().to_arrow()))
        return table.select(pl.col(column).cast(kind) for column, kind in COLUMNS_OF_TABLE[name].items())

    def frame(self, rows: pl.DataFrame) -> DataFrame:
        # Spark interprets the rows of local relations, which takes seconds for a real history.
        path = self.folder / f"{uuid.uuid4()}.parquet"
        rows.write_parquet(path)
        schema = from_arrow_schema(arrow_schema(dict(rows.schema)))
        # Several partitions, so that the rows of an object come from different ones.
        return self.session.read.schema(schema).parquet(str(path)).repartition(3)


class ReferenceRegistry:
    """The same tables by the reference, in memory."""

    def __init__(self) -> None:
        self.pulls: dict[str, pl.DataFrame] = {}
        self.audits: dict[str, pl.DataFrame] = {}
        self.catalogue = pl.DataFrame(schema=CATALOGUE_COLUMNS)
        self.history = pl.DataFrame(schema=PULLED_COLUMNS)
        self.objects = pl.DataFrame(schema=OBJECT_COLUMNS)
        self.looked_up = 0

    def take(self, pulled: pl.DataFrame, entries: pl.DataFrame = NO_ENTRIES) -> pl.DataFrame:
        for (name,), rows in pulled.partition_by("snapshot_id", as_dict=True).items():
            self.pulls[str(name)] = rows
        merged = reference.merge_pulled_sets(self.catalogue, pulled, self.lookup)
        self.looked_up += merged.lookup_count
        self.objects = reference.update_objects(self.objects, merged.winners, pulled, entries)
        states = self.objects.select("sat_no", "state")
        self.catalogue = merged.winners.join(states, on="sat_no", how="left").select(list(CATALOGUE_COLUMNS))
        self.history = pl.concat([self.history, reference.select_new_sets(self.history, pulled)])
        for (name,), rows in merged.audit.partition_by("snapshot_id", as_dict=True).items():
            self.audits[str(name)] = rows
        return merged.audit

    def lookup(self, objects: pl.Series) -> pl.DataFrame:
        return pl.concat(self.pulls.values()).filter(pl.col("sat_no").is_in(objects.implode()))


def assert_same_tables(computed: SparkRegistry, expected: ReferenceRegistry, context: str) -> None:
    audits = pl.concat(expected.audits.values()).sort("snapshot_id", "sat_no") if expected.audits else None
    assert computed.rows(CATALOGUE_ROWS).sort("sat_no").equals(expected.catalogue), context
    assert computed.rows(OBJECT_ROWS).sort("sat_no").equals(expected.objects), context
    assert computed.rows(HISTORY_ROWS).sort(SET_KEY).equals(expected.history.sort(SET_KEY)), context
    if audits is not None:
        assert computed.rows(AUDIT_ROWS).sort("snapshot_id", "sat_no").equals(audits), context
    assert computed.looked_up == expected.looked_up, context


# -- random histories ------------------------------------------------------------------------------------

OBJECTS = 400
WORDS = ("18sds", "esa", "numerica", "active", "unknown_one")


def random_pull(chance: random.Random, number: int, spread: int) -> pl.DataFrame:
    """A pull of some objects, whose epochs and elements often agree or disagree with those of other pulls."""
    hours = chance.randrange(12) + 100 * (chance.random() < 0.3)
    name = f"{chance.choice(WORDS)}-{REFERENCE_EPOCH + timedelta(hours=hours):%Y%m%dT%H%M}Z"
    base = simulated_elements(seed=2, objects=OBJECTS, epoch=REFERENCE_EPOCH)
    some = [n for n in range(OBJECTS) if chance.random() < 0.7]
    rows = base[some].with_columns(
        sat_no=pl.Series([n + 1 for n in some], dtype=pl.Int64),
        epoch=pl.Series(
            [REFERENCE_EPOCH + timedelta(hours=chance.randrange(spread)) for _ in some],
            dtype=pl.Datetime("us", "UTC"),
        ),
        bstar=pl.Series([chance.choice((0.0, -0.0, 0.1, 0.2)) for _ in some]),
        mean_motion_dot=pl.Series([chance.choice((None, 0.0, 1e-5)) for _ in some], dtype=pl.Float64),
        object_name=pl.Series([f"{number} {n}" for n in some]),
        snapshot_id=pl.lit(name),
        data_mode=pl.lit("REAL"),
        source=pl.lit(source_name(name)),
        collected_at=pl.lit(REFERENCE_EPOCH + timedelta(hours=hours)),
    )
    return rows.select(pl.col(c).cast(t) for c, t in PULLED_COLUMNS.items())


def random_entries(chance: random.Random) -> pl.DataFrame:
    hours = chance.randrange(12)
    rows = [
        {
            **dict.fromkeys(DATED_ENTRY_COLUMNS),
            "snapshot_id": f"satcat-{hours}",
            "sat_no": n,
            "object_name": chance.choice((None, "A", "B")),
            "owner": chance.choice((None, "US", "UK")),
            "decay_date": chance.choice((None, None, date(2026, 8, 6), date(2026, 8, 8))),
            "rcs_m2": chance.choice((None, 0.5)),
            "collected_at": REFERENCE_EPOCH + timedelta(hours=hours),
        }
        for n in range(1, OBJECTS + 20)
        if chance.random() < 0.3
    ]
    return pl.DataFrame(rows, schema=DATED_ENTRY_COLUMNS)


def test_random_histories_give_the_rows_of_the_reference(session, catalog, tmp_path):
    outcomes: set[str] = set()
    for seed in SEEDS:
        chance = random.Random(seed)
        computed, expected = SparkRegistry(session, catalog, tmp_path), ReferenceRegistry()
        # Epochs of up to 70 hours after the collection: some are in the future.
        pulls = [random_pull(chance, number, chance.choice((3, 70))) for number in range(5)]
        for step, one in enumerate(pulls):
            batch = [one, *([chance.choice(pulls)] if chance.random() < 0.4 else [])]
            together = {rows["snapshot_id"][0]: rows for rows in batch}
            if chance.random() < 0.3:  # a corrected pull has fewer objects
                together = {name: rows.sample(fraction=0.6, seed=seed) for name, rows in together.items()}
            pulled = pl.concat(together.values())
            if chance.random() < 0.2:
                pulled = pulled.clear()
            entries = random_entries(chance) if chance.random() < 0.5 else NO_ENTRIES
            computed.take(pulled, entries)
            outcomes |= set(expected.take(pulled, entries)["outcome"])
            assert_same_tables(computed, expected, f"seed {seed}, step {step}")
        assert set(expected.objects["state"]) <= {*STATES}
        assert computed.looked_up, f"seed {seed}"
    assert outcomes == {*OUTCOMES}


def named_pull(name: str, sat_nos: list[int], hours: float) -> pl.DataFrame:
    when = REFERENCE_EPOCH + timedelta(hours=hours)
    base = simulated_elements(seed=2, objects=len(sat_nos), epoch=when).with_columns(
        sat_no=pl.Series(sat_nos, dtype=pl.Int64),
        epoch=pl.lit(when),
        snapshot_id=pl.lit(f"{name}-{when:%Y%m%dT%H%M}Z"),
        data_mode=pl.lit("REAL"),
        source=pl.lit("18SDS"),
        collected_at=pl.lit(when),
    )
    return base.select(pl.col(c).cast(t) for c, t in PULLED_COLUMNS.items())


def test_a_feed_that_loses_its_latest_sightings_is_merged_again(session, catalog, tmp_path):
    computed, expected = SparkRegistry(session, catalog, tmp_path), ReferenceRegistry()
    pulls = [
        named_pull("small", [1, 2], 0),
        # Object 2 leaves its feed, and is gone after three days.
        named_pull("small", [1], 80),
        # Then all objects of the last pull of that feed are seen elsewhere, so nothing shows that 2 is gone.
        named_pull("large", [1, 3], 81),
    ]
    states = []
    for step, pulled in enumerate(pulls):
        computed.take(pulled)
        expected.take(pulled)
        assert_same_tables(computed, expected, f"step {step}")
        states.append(dict(expected.objects.select("sat_no", "state").iter_rows())[2])
    assert states == ["tracked", "stale", "tracked"]
    assert computed.repetitions == 1


# -- real catalogs ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_real_snapshots_in_any_order_give_the_rows_of_the_reference(session, catalog, tmp_path):
    paths = sorted(SNAPSHOTS.glob("active-*.tle.gz"))
    assert len(paths) == 22
    content = (SNAPSHOTS / "satcat-active-20260822.json.gz").read_bytes()
    entries = read_satcat(content, "satcat", ReadLimits())[0].with_columns(
        snapshot_id=pl.lit("satcat-active-20260822"), collected_at=pl.lit(datetime(2026, 8, 22, tzinfo=UTC))
    ).select(list(DATED_ENTRY_COLUMNS)).filter(pl.col("sat_no") % OBJECT_STEP == 0)  # fmt: skip
    seed = 4
    order = list(enumerate(paths))
    random.Random(seed).shuffle(order)
    computed, expected = SparkRegistry(session, catalog, tmp_path), ReferenceRegistry()
    for step, (number, path) in enumerate(order[:REAL_PULLS]):
        # Snapshots of different times stand for different providers.
        name = f"{('celestrak', 'esa', 'leolabs')[number % 3]}-{path.name.removesuffix('.tle.gz')}"
        when = snapshot_time(name)
        pulled = (
            read_catalogue(path.read_bytes(), name, collected_at=when)
            .elements.with_columns(
                snapshot_id=pl.lit(name), data_mode=pl.lit("REAL"),
                source=pl.lit(source_name(name)), collected_at=pl.lit(when),
            )
            .select(pl.col(c).cast(t) for c, t in PULLED_COLUMNS.items())
            .filter(pl.col("sat_no") % OBJECT_STEP == 0)
        )  # fmt: skip
        stated = entries if step == REAL_PULLS // 2 else NO_ENTRIES
        computed.take(pulled, stated)
        expected.take(pulled, stated)
        assert_same_tables(computed, expected, f"seed {seed}, step {step}, {name}")
    assert expected.catalogue.height > 15_000 // OBJECT_STEP


# -- tables ----------------------------------------------------------------------------------------------


def test_tables_of_earlier_versions_get_source_and_time_of_collection(session, catalog, tmp_path):
    for name in ("esa-20260808T0220Z", "esa-x"):
        old = random_pull(random.Random(1), 0, 3).head(5).with_columns(snapshot_id=pl.lit(name))
        registry = SparkRegistry(session, catalog, tmp_path)
        inputs = {PULLED: old.drop("source", "collected_at"), ENTRIES: NO_ENTRIES}
        report = merge_pulls(
            {input_name: registry.frame(rows) for input_name, rows in inputs.items()},
            PulledSnapshots({name: None}),
            registry.worker_tables(),
            lambda: pytest.fail("no object is uncertain"),
        )
        for table_name, table in registry.tables.items():
            commit_files(table, added=report.files[table_name], removed=(), properties={})
        catalogue = registry.rows(CATALOGUE_ROWS)
        assert set(catalogue["source"]) == {"ESA_SST"}
        written = snapshot_time(name)
        expected = catalogue["epoch"].to_list() if written is None else [written] * 5
        assert catalogue["collected_at"].to_list() == expected
        assert set(registry.rows(OBJECT_ROWS)["state"]) == {"tracked"}


def test_a_table_gets_missing_columns_and_keeps_its_rows(catalog):
    short = pa.schema([("sat_no", pa.int64())])
    table = open_table(catalog, ("sda", "short"), short)
    table.append(pa.table({"sat_no": [1]}, schema=short))
    opened = open_table(catalog, ("sda", "short"), pa.schema([*short, ("state", pa.string())]))
    assert opened.scan().to_arrow().to_pylist() == [{"sat_no": 1, "state": None}]


def test_a_table_that_is_not_partitioned_by_snapshots_is_refused(catalog):
    columns = arrow_schema(COLUMNS_OF_TABLE[AUDIT_ROWS])
    plain = open_table(catalog, ("sda", "plain"), columns)
    plain.append(pa.table({name: [None] for name in columns.names}, schema=columns))
    with pytest.raises(Unsupported) as refused:
        list_files(plain, "snapshot_id", [str(number) for number in range(300)])
    assert refused.value.table == "sda.plain"


def test_files_of_a_table_that_does_not_change_are_deleted(catalog):
    rows = pa.table({"sat_no": [1, 2]})
    table = open_table(catalog, ("sda", "unchanged"), rows.schema)
    worker_table = WorkerTable(table.metadata.model_dump_json(), table.io.properties)
    assert worker_table.write(rows.slice(0, 0)) == []
    files = worker_table.write(rows)
    assert [file.record_count for file in files] == [2]
    assert table.io.new_input(files[0].file_path).exists()
    for _ in range(2):  # again after a crash
        delete_files(table, files)
        assert not table.io.new_input(files[0].file_path).exists()
    assert table.scan().to_arrow().num_rows == 0


def test_a_file_that_cannot_be_deleted_fails_no_run(catalog, monkeypatch, caplog):
    rows = pa.table({"sat_no": [1]})
    table = open_table(catalog, ("sda", "locked"), rows.schema)
    files = WorkerTable(table.metadata.model_dump_json(), table.io.properties).write(rows)

    def refuse(*_):
        raise PermissionError("no right to delete")

    monkeypatch.setattr(type(table.io), "delete", refuse)
    delete_files(table, files)
    assert files[0].file_path in caplog.text


def test_columns_of_others_are_found_by_their_values(catalog):
    known = pa.schema([("sat_no", pa.int64())])
    table = open_table(catalog, ("sda", "extended"), known)
    table.append(pa.table({"sat_no": [1]}, schema=known))
    with table.update_schema() as update:
        update.union_by_name(pa.schema([*known, ("note", pa.string()), ("empty", pa.string())]))
    assert find_foreign_columns(table, list_files(table), known.names) == []
    table.append(pa.table({"sat_no": [2, 3], "note": ["a", None], "empty": pa.nulls(2, pa.string())}))
    assert find_foreign_columns(table, list_files(table), known.names) == ["note"]


def test_the_description_of_a_table_has_no_snapshots(catalog):
    rows = pa.table({"sat_no": [1]})
    table = open_table(catalog, ("sda", "described"), rows.schema)
    for _ in range(3):
        table.append(rows)
    described = WorkerTable.from_table(table, Settings())
    assert str(table.current_snapshot().snapshot_id) not in described.metadata_json
    (file,) = WorkerTable(described.metadata_json, table.io.properties).write(rows)
    commit_files(table, added=[file], removed=(), properties={})
    assert table.refresh().scan().to_arrow().num_rows == 4
