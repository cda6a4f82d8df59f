"""Functions for Spark's workers, as they are pickled."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from branchlake_dagster.sda.conjunctions import distributed as conjunctions
from branchlake_dagster.sda.conjunctions.arrow import merge_batches
from branchlake_dagster.sda.conjunctions.risks import fit_track_elements
from branchlake_dagster.sda.conjunctions.tasks import Screening
from branchlake_dagster.sda.ephemerides.distributed import FileScreening
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.shipping import pickle_by_value


def functions(folder: Path | None = None):
    """Two functions. The first one has the code of a class, the second one an object of it."""

    class Held:
        number = 7

    def note(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if folder is not None:
                (folder / f"{Held.number}-{len(list(folder.iterdir()))}").touch()
            yield batch

    held = Held()

    def keep(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, held.number)

    return note, keep


def test_a_function_is_pickled_to_the_same_bytes_after_another_one():
    note, keep = map(pickle_by_value, functions())
    before = cloudpickle.dumps(note)
    assert cloudpickle.dumps(keep)
    assert cloudpickle.dumps(note) == before
    rows = pa.RecordBatch.from_pydict({"n": list(range(9))})
    for function in (keep, cloudpickle.loads(cloudpickle.dumps(keep))):
        assert [batch.num_rows for batch in function([rows])] == [7]


@pytest.mark.spark
def test_persisted_rows_of_functions_are_computed_once(lakehouse, tmp_path):
    session = lakehouse.spark_session()
    try:
        note, keep = map(pickle_by_value, functions(tmp_path))
        numbers = session.createDataFrame([(k,) for k in range(9)], "n long").repartition(1)
        rows = numbers.mapInArrow(note, "n long").mapInArrow(keep, "n long").persist()
        assert [rows.count() for _ in range(3)] == [7, 7, 7]
        rows.unpersist()
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        session.stop()


def pickle_functions_of_workers() -> list[bytes]:
    nothing = np.zeros(0)
    elements = Elements(
        nothing.astype(np.int64), nothing.astype(np.int64), np.zeros((0, len(ELEMENT_FIELDS)))
    )
    catalogue = pl.DataFrame(schema=dict.fromkeys(Elements.COLUMNS, pl.Float64))
    functions = (
        conjunctions._batches(Screening.of_all(elements, 5.0), []),
        FileScreening(catalogue, 5.0, 30.0, []).screen_batches,
        merge_batches,
        fit_track_elements,
    )
    return [cloudpickle.dumps(pickle_by_value(function)) for function in functions]


def test_workers_without_the_package_can_load_the_functions(tmp_path):
    for number, pickled in enumerate(pickle_functions_of_workers()):
        (tmp_path / str(number)).write_bytes(pickled)
    code = """
import pathlib, pickle, sys
sys.modules["branchlake_dagster"] = None
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    assert list(pickle.loads(path.read_bytes())([])) == []
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)
