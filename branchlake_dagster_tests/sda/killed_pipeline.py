"""Run by test_killed_pipeline.py: computes stages of the space pipeline in processes that die at given places.

Each line of the input is a stage and a place, separated by a tab. The stage is one of `STAGES`, or `publish`.
The place `-` is nowhere. A place `during SECONDS` is so long after the begin. The exit code of the process is
the answer.
"""

# ruff: noqa: T201 - it is a command

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import dagster as dg

from branchlake_dagster.incremental import outputs
from branchlake_dagster.ingest import batch_passes, ingest_batch
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.sda.assets import alerts, observations, risks, tracks
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables import spark_frames
from branchlake_dagster_tests.sda.shuffled_bytes import (
    BY_HOUR,
    DEAD_LETTERS,
    EVERY_RISK,
    GP_FOLDER,
    LARGE_OBJECTS,
    QUIET,
    RAW_TABLES,
    space_pipeline,
)

HOUR = "TEST_HOUR"
NOWHERE = "-"
_WRITE = {
    "before the branch write": (spark_frames, "write_spark_frame", True),
    "after the branch write": (spark_frames, "write_spark_frame", False),
    "before the position": (outputs, "record_consumption", True),
    "after the position": (outputs, "record_consumption", False),
}
STAGES: dict[str, dict[str, tuple[Any, str, bool]]] = {
    "ingest": {
        "compute": (batch_passes, "scan_records", False),
        "before the branch write": (ingest_batch, "commit_tables", True),
        "after the branch write": (ingest_batch, "commit_tables", False),
    },
    "observe": {"compute": (observations, "build_observations", False), **_WRITE},
    "reject": {"compute": (observations, "build_rejected_observations", False), **_WRITE},
    "tracks": {
        "compute": (tracks.ElementPrior, "from_sigma", True),
        "compute of risks": (risks, "elements_of_tracks", False),
        **_WRITE,
    },
    "alerts": {"compute": (alerts, "derive_entries", True), **_WRITE},
}
"""By stage and place the function, by its owner and name, and whether the process dies before it."""
PUBLICATION = {
    "before the publication": (NessieClient, "merge", True),
    "after the publication": (NessieClient, "merge", False),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: Any, name: str, before: bool) -> None:
    """Have this process die before or after a function has worked."""
    function: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> None:
        if not before:
            function(*args, **options)
        die()

    setattr(owner, name, wrapped)


def prepare_death(stage: str, place: str) -> None:
    if place.startswith("during "):
        seconds = float(place.removeprefix("during "))
        threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()
    elif place != NOWHERE:
        die_at(*{**STAGES.get(stage, {}), **PUBLICATION}[place])


def work(stage: str, place: str) -> None:
    definitions = space_pipeline(LakehouseResource.from_settings(Settings()), os.environ[GP_FOLDER])
    prepare_death(stage, place)
    with dg.DagsterInstance.get() as instance:
        if stage == "publish":
            graph = definitions.get_repository_def().asset_graph
            for outcome in Reconciler.from_lake(Lakehouse(), instance, graph).reconcile_branches():
                print(outcome, file=sys.stderr)
            return
        hour = os.environ[HOUR]
        assets, partition, ops = {
            "ingest": ([*RAW_TABLES, *DEAD_LETTERS], None, {}),
            "observe": ([OBSERVATIONS], hour, {}),
            "reject": ([REJECTED_OBSERVATIONS], None, {}),
            "tracks": (BY_HOUR, hour, LARGE_OBJECTS),
            "alerts": ([CONJUNCTION_ALERTS], None, EVERY_RISK),
        }[stage]
        done = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance,
            asset_selection=list(assets),
            partition_key=partition,
            run_config={**QUIET, "ops": ops},
            raise_on_error=False,
        )
        if not done.success:
            print([event.message for event in done.all_events if event.is_step_failure], file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        worker = context.Process(target=work, args=line.rstrip("\n").split("\t"))
        worker.start()
        worker.join()
        print(worker.exitcode, flush=True)
