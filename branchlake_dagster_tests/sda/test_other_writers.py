"""Other engines and people write to the catalogue and to the list of close approaches on `main`."""

from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS
from branchlake_dagster_tests.sda.test_conjunctions import (  # noqa: F401 - a fixture
    NEAR,
    NOON,
    elements_at,
    given,
    gp_folder,
    listed,
    run,
    why,
)

NAMING = ("event_id", "first_reported", "previous_miss_distance_km")
PAIR = ("sat1_object_designator", "sat2_object_designator")


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.drop(NAMING).sort("kind", *PAIR, "tca")


@pytest.mark.spark
def test_whoever_writes_the_list_is_that_of_the_catalogue(
    lakehouse: Lakehouse,
    run: Any,  # noqa: F811
    spark_session: Any,
) -> None:
    def sql(text: str) -> None:
        session = lakehouse.spark_session("main")
        try:
            session.sql(text)
        finally:
            session.stop()

    def anew() -> pl.DataFrame:
        run(CONJUNCTIONS, run_config=NEAR, tags={"branchlake/rebuild": "true"})
        return rows(listed(lakehouse))

    given["catalogue"] = elements_at("sim-20260808T1200Z", [])
    run(CATALOGUE)
    run(CONJUNCTIONS, run_config=NEAR)
    first = listed(lakehouse)
    catalogue = f"nessie.{'.'.join(CATALOGUE.path)}"
    table = f"nessie.{'.'.join(CONJUNCTIONS.path)}"

    # An object is deleted, one is moved, and the files are written anew, by hand, on main.
    gone, moved = _of_first(first)
    sql(f"DELETE FROM {catalogue} WHERE sat_no = {gone}")
    sql(f"UPDATE {catalogue} SET mean_anomaly = mean_anomaly / 2 WHERE sat_no = {moved}")
    sql(
        f"CALL nessie.system.rewrite_data_files(table => '{'.'.join(CATALOGUE.path)}',"
        " options => map('rewrite-all', 'true'))"
    )
    done = run(CONJUNCTIONS, run_config=NEAR)
    assert why(done) == "pairs of 1 changed object"  # the other one is in no pair any more
    kept_up = rows(listed(lakehouse))
    assert not kept_up.filter(pl.any_horizontal(pl.col(PAIR) == gone)).height
    assert kept_up.equals(anew())

    # A compaction of the list is nobody's change of it.
    sql(
        f"CALL nessie.system.rewrite_data_files(table => '{'.'.join(CONJUNCTIONS.path)}',"
        " options => map('rewrite-all', 'true'))"
    )
    given["catalogue"] = elements_at("sim-20260808T1300Z", [moved]).filter(sat_no=moved)
    run(CATALOGUE)
    assert why(run(CONJUNCTIONS, run_config=NEAR)) == "pairs of 1 changed object"
    assert rows(listed(lakehouse)).equals(anew())

    # A row of it that is deleted by hand comes back: the list is that of the catalogue.
    before = listed(lakehouse)
    sql(f"DELETE FROM {table} WHERE event_id = '{before['event_id'][0]}'")
    given["catalogue"] = elements_at("sim-20260808T1300Z", []).filter(sat_no=moved)
    run(CATALOGUE)
    assert why(run(CONJUNCTIONS, run_config=NEAR)) == "all pairs: there is no earlier list"
    assert rows(listed(lakehouse)).equals(anew())
    assert listed(lakehouse)["screened_from"].unique().to_list() == [NOON + timedelta(hours=1)]


def _of_first(found: pl.DataFrame) -> tuple[int, int]:
    """The objects of an encounter."""
    one = found.filter(kind="encounter").row(0, named=True)
    return one[PAIR[0]], one[PAIR[1]]
