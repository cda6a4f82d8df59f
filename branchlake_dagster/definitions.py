"""The code location: the branch machinery, and the Space Domain Awareness graph that runs on it."""

import os
from pathlib import Path

import dagster as dg

from branchlake_dagster import Settings, branchlake_definitions
from branchlake_dagster.fusion.graph.definitions import (
    fusion_assets,
    fusion_checks,
    fusion_jobs,
    fusion_schedules,
    fusion_sensors,
)
from branchlake_dagster.fusion.sources import GpSource

GP_DIR = "BRANCHLAKE_GP_DIR"
"""Environment variable: the folder of GP files (TLE, OMM); unset: `gp` in the state folder, if it exists."""


def gp_folder(settings: Settings) -> Path:
    """Where GP files are looked for."""
    return Path(os.environ.get(GP_DIR) or settings.state_dir / "gp")


def build_definitions(settings: Settings) -> dg.Definitions:
    """Everything, for the given settings."""
    folder = gp_folder(settings)
    gp = GpSource(catalogue_dir=str(folder) if folder.is_dir() else None)
    graph = dg.Definitions(
        assets=fusion_assets,
        asset_checks=fusion_checks,
        jobs=fusion_jobs,
        schedules=fusion_schedules,
        sensors=fusion_sensors,
        resources={"gp": gp},
        # One process per run: a process per step costs its start-up for each, and the work is Spark's.
        executor=dg.in_process_executor,
    )
    return branchlake_definitions(settings, graph)


defs = build_definitions(Settings())
