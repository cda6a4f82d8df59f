"""The registry on the lake: what ten runs publish that all began at the same state of `main`."""

import subprocess
import sys
from contextlib import contextmanager

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.assets.catalogue import CATALOGUE, SATELLITE_ENTRIES, gp_ingest
from branchlake_dagster.sda.assets.registry import (
    ELEMENT_HISTORY,
    OBJECTS,
    SATELLITES,
    registry,
    satellites,
)
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.gp.write import format_omm_json
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.registry.life_cycle import OBJECT_COLUMNS
from branchlake_dagster.sda.registry.merge import CATALOGUE_COLUMNS, SET_KEY
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.sda.test_registry import Registry

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

WRITERS = 10
AT_ONCE = 4
"""In processes of their own, each with its imports."""
RULE = dg.AssetCheckKey(OBJECTS, "tracked_have_elements")
NAMES = [f"{('18sds', 'esa', 'numerica')[n % 3]}-20260808T{n:02d}00Z" for n in range(WRITERS)]
SATCAT = "satcat-20260809T0000Z"


@pytest.fixture
def empty_lake(lakehouse):
    """The shared lake without tables of this graph, before and after: others count what is on `main`."""

    def clear() -> None:
        catalog = lakehouse.catalog(MAIN)
        if catalog.namespace_exists("sda"):
            for name in catalog.list_tables("sda"):
                catalog.drop_table(name)

    clear()
    yield lakehouse
    clear()


@pytest.fixture
def stage(empty_lake, tmp_path):
    """Without the lease, which lets only one of them work at a time: what is tested is what holds without it."""
    with stage_of(empty_lake, tmp_path, {"branchlake/exclusive": None}) as made:
        yield made


@pytest.fixture
def leased_stage(empty_lake, tmp_path):
    with stage_of(empty_lake, tmp_path, {}) as made:
        yield made


@contextmanager
def stage_of(empty_lake, tmp_path, metadata):
    for number, name in enumerate(NAMES):
        # Each pull has two thirds of the objects, on orbits and at epochs of its own.
        elements = simulated_elements(seed=number, objects=90, epoch=REFERENCE_EPOCH)
        some = elements.with_columns(sat_no=pl.int_range(1, 91)).filter(pl.col("sat_no") % 3 != number % 3)
        (tmp_path / f"{name}.json").write_text(format_omm_json(some))
    (tmp_path / f"{SATCAT}.csv").write_text("NORAD_CAT_ID,OWNER,DECAY_DATE\n7,US,2026-08-08\n8,UK,\n")
    # The other checks are of single tables, and have tests of their own.
    rule = [one for one in fusion_checks if RULE in one.check_keys]
    lax = {"branchlake/require_checks": False, **metadata}
    assets = [
        one.map_asset_specs(lambda spec: spec.merge_attributes(metadata=lax))
        for one in (gp_ingest, registry, satellites)
    ]
    with project(empty_lake, *assets, *rule) as made:
        resources = {**made.definitions.resources, "gp": GpSource(catalogue_dir=str(tmp_path))}
        made.definitions = dg.Definitions(
            assets=made.definitions.assets,
            asset_checks=made.definitions.asset_checks,
            resources=resources,
            executor=dg.in_process_executor,
        )
        made.instance.add_dynamic_partitions("gp_snapshots", [*NAMES, SATCAT, "another"])
        yield made


def of_main(stage: Project, key: dg.AssetKey, columns) -> pl.DataFrame:
    rows = stage.lake.catalog(MAIN).load_table(tuple(key.path)).scan().to_arrow()
    return pl.DataFrame(pl.from_arrow(rows)).select(pl.col(n).cast(t) for n, t in columns.items())


def launch(stage: Project, *names: str) -> str:
    wanted = [key for one in (gp_ingest, registry) for key in one.keys]
    if len(names) == 1:
        return stage.run(*wanted, partition=names[0])
    tags = {
        "dagster/asset_partition_range_start": names[0],
        "dagster/asset_partition_range_end": names[-1],
    }
    return stage.run(*wanted, tags=tags)


def rule_holds(stage: Project) -> bool:
    objects = of_main(stage, OBJECTS, OBJECT_COLUMNS)
    catalogue = of_main(stage, CATALOGUE, CATALOGUE_COLUMNS)
    tracked = objects.filter(pl.col("state") == "tracked")
    return tracked.join(catalogue, on=["sat_no", "epoch", "source", "state"], how="anti").height == 0


def is_as_one_after_the_other(stage: Project, names: list[str]) -> None:
    expected = Registry()
    columns = {name: kind for name, kind in CATALOGUE_COLUMNS.items() if name != "state"}
    pulls = stage.lake.catalog(MAIN).load_table(("sda", "element_sets")).scan().to_arrow()
    for name in reversed(names):
        mine = pl.DataFrame(pl.from_arrow(pulls)).filter(pl.col("snapshot_id") == name)
        expected.take(mine.select(pl.col(n).cast(t) for n, t in columns.items()))
    catalogue = of_main(stage, CATALOGUE, columns).sort("sat_no")
    assert catalogue.equals(expected.catalogue)
    assert of_main(stage, OBJECTS, OBJECT_COLUMNS).sort("sat_no").equals(expected.objects)
    sets = [
        frame.select(SET_KEY).sort(SET_KEY)
        for frame in (of_main(stage, ELEMENT_HISTORY, columns), expected.history)
    ]
    assert sets[0].equals(sets[1])


def test_ten_writers_at_once_publish_what_one_after_the_other_would(stage):
    assert stage.settle(launch(stage, NAMES[0])).state is RunState.PUBLISHED
    # All have read and written before any of them is published.
    runs = [launch(stage, name) for name in NAMES[1:]]
    settled = [stage.settle(run) for run in runs]
    done = [one.state is RunState.PUBLISHED for one in settled]
    assert done == [True] + [False] * (WRITERS - 2)
    for one in settled[1:]:
        assert one.state is RunState.REFUSED
        assert one.codes == ("read_and_changed",)
    assert rule_holds(stage)
    assert of_main(stage, OBJECTS, OBJECT_COLUMNS).height == 90
    # What was refused is launched again: a backfill is one run.
    assert stage.settle(launch(stage, *NAMES[2:])).state is RunState.PUBLISHED
    assert rule_holds(stage)

    is_as_one_after_the_other(stage, NAMES)

    # A satellite catalogue is a pull as well: its decays are tombstones, its facts are dated.
    assert stage.settle(launch(stage, SATCAT)).state is RunState.PUBLISHED
    found = dict(of_main(stage, OBJECTS, OBJECT_COLUMNS).select("sat_no", "state").iter_rows())
    assert (found[7], found[8]) == ("decayed", "tracked")
    assert stage.settle(stage.run(SATELLITES)).state is RunState.PUBLISHED
    rows = stage.rows("sda", "satellites")
    assert sorted((row["sat_no"], row["owner"], row["valid_to"]) for row in rows) == [
        (7, "US", None),
        (8, "UK", None),
    ]
    assert SATELLITE_ENTRIES in gp_ingest.keys
    assert rule_holds(stage)


def test_a_run_with_the_lease_works_on_what_the_one_before_has_published(leased_stage):
    for name in NAMES[:2]:
        assert leased_stage.settle(launch(leased_stage, name)).state is RunState.PUBLISHED
    are_published_with_the_lease(leased_stage, NAMES[:2])


# In `make test`, the test above has the same runs after each other, and runs/test_leases.py those that wait for a lease.
@pytest.mark.soak
def test_writers_with_the_lease_are_all_published(stage, tmp_path, monkeypatch):
    """Launched together, they work one after the other, each on what the one before has published."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(stage.lake.settings.state_dir))
    names = NAMES[:AT_ONCE]
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions("gp_snapshots", names)
    writer = "branchlake_dagster_tests.sda.registry_writer"
    writers = [subprocess.Popen([sys.executable, "-m", writer, name]) for name in names]
    assert [one.wait(300) for one in writers] == [0] * AT_ONCE
    are_published_with_the_lease(stage, names)


def are_published_with_the_lease(stage: Project, names: list[str]) -> None:
    assert rule_holds(stage)
    is_as_one_after_the_other(stage, names)
    tokens = [
        entry.commit.properties[LakeProperty.FENCING_TOKEN]
        for entry in stage.lake.nessie.log(MAIN, limit=100)
        if "branchlake.publication_id" in entry.commit.properties
        and LakeProperty.FENCING_TOKEN in entry.commit.properties
    ][: len(names)]
    first = int(tokens[-1].removeprefix("registry="))
    assert tokens == [f"registry={first + number}" for number in reversed(range(len(names)))]
    audit = stage.lake.catalog(MAIN).load_table(("sda", "catalog_merge_audit"))
    for snapshot in audit.metadata.snapshots[-len(names) :]:
        # Undo compares later writes by the record of the replaced rows.
        assert snapshot.summary[LakeProperty.WRITE_MODE] == "replace_partitions"
        assert snapshot.summary[LakeProperty.PARTITION] in names
        assert snapshot.summary[LakeProperty.PARTITION] in snapshot.summary[LakeProperty.REPLACED]
        assert snapshot.summary[LakeProperty.STEP] == "registry"
