"""The benchmark of waiting runs publishes the runs that it makes, on the real Nessie."""

from __future__ import annotations

from branchlake_dagster.bench.publication_workloads import measure_replaced_runs, measure_waiting_runs
from branchlake_dagster.lakehouse.lakehouse import Lakehouse


def test_every_waiting_run_is_published(lakehouse: Lakehouse) -> None:
    # The benchmark raises if a run is not published or if a row is lost or doubled.
    assert measure_waiting_runs(lakehouse, 2, say=lambda _: None)["waiting_2_s"] > 0
    assert measure_replaced_runs(lakehouse, 2, say=lambda _: None)["waiting_replaced_2_s"] > 0
