"""The code location: branchlake's definitions, and the Space Domain Awareness graph."""

import os
from pathlib import Path
from typing import get_args

import dagster as dg

from branchlake_dagster import Settings, branchlake_definitions, maintenance_definitions
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.sda.assets.raw import Where
from branchlake_dagster.sda.contracts.fields import DataMode
from branchlake_dagster.sda.graph.definitions import (
    fusion_assets,
    fusion_checks,
    fusion_jobs,
    fusion_schedules,
    fusion_sensors,
    pull_schedule,
)
from branchlake_dagster.sda.graph.sensor_graph import sensor_graph
from branchlake_dagster.sda.providers.celestrak import CelesTrak
from branchlake_dagster.sda.providers.pulled import GpProvider
from branchlake_dagster.sda.providers.space_track import SpaceTrack
from branchlake_dagster.sda.sensor_kinds.registered import select_sensor_kinds
from branchlake_dagster.sda.sources import GpSource

GP_DIR = "BRANCHLAKE_GP_DIR"
"""Environment variable: the folder of GP files (TLE, OMM). If unset: `gp` in the state folder."""

GP_PULL = "BRANCHLAKE_GP_PULL"
"""Environment variable: the provider from which catalogs are pulled. If unset: none."""


LIVE_SENSORS = "BRANCHLAKE_LIVE_SENSORS"
"""Environment variable: where the sensors' topics are, `landing` (the default) or `kafka`."""


SENSORS = "BRANCHLAKE_SENSORS"
"""Environment variable: the kinds of sensor, as `select_sensor_kinds` reads them. If unset: `default`."""


DATA_MODE = "BRANCHLAKE_DATA_MODE"
"""Environment variable: whether the measurements are real, one of `DataMode`. If unset: `REAL`."""


KEEP_RECORDS = "BRANCHLAKE_KEEP_RECORDS"
"""Environment variable: whether the bytes of measurements are kept, `true` or `false`; unset: `false`."""


def sensor_measurements(settings: Settings) -> dg.Definitions:
    """Return the part of the graph from sensors' messages to tracks, as the environment configures it.

    Raises ConfigurationError for an invalid environment variable.
    """
    wanted = os.environ.get(LIVE_SENSORS, "").strip().lower() or "landing"
    if wanted not in ("landing", "kafka"):
        raise ConfigurationError(
            f"{LIVE_SENSORS} is {wanted!r}.", hint="Set it to landing or kafka, or unset it."
        )
    kinds = select_sensor_kinds(os.environ.get(SENSORS, ""))
    source: Where = "kafka" if wanted == "kafka" else "landing"
    return sensor_graph(kinds, source, settings.receiver_monitors, data_mode(), keep_value=keeps_records())


def keeps_records() -> bool:
    """Return whether the environment asks to keep the bytes of records. Raises ConfigurationError."""
    wanted = os.environ.get(KEEP_RECORDS, "").strip().lower() or "false"
    if wanted not in ("true", "false"):
        raise ConfigurationError(
            f"{KEEP_RECORDS} is {wanted!r}.", hint="Set it to true or false, or unset it."
        )
    return wanted == "true"


def data_mode() -> DataMode:
    """Return the data mode that the environment configures. Raises ConfigurationError."""
    wanted = os.environ.get(DATA_MODE, "").strip().upper() or "REAL"
    modes: tuple[DataMode, ...] = get_args(DataMode)
    for mode in modes:
        if mode == wanted:
            return mode
    raise ConfigurationError(
        f"{DATA_MODE} is {wanted!r}.", hint=f"Set it to one of {', '.join(modes)}, or unset it."
    )


def gp_provider(settings: Settings) -> GpProvider | None:
    """Return the provider that the environment configures, or None. Raises ConfigurationError."""
    cache = str(settings.state_dir / "gp-cache")
    providers = {"celestrak": CelesTrak, "space-track": SpaceTrack}
    wanted = os.environ.get(GP_PULL, "").strip().lower()
    if wanted and wanted not in providers:
        raise ConfigurationError(
            f"{GP_PULL} is {wanted!r}.", hint=f"Set it to {' or '.join(providers)}, or unset it."
        )
    return providers[wanted](cache_dir=cache) if wanted else None


def gp_folder(settings: Settings) -> Path:
    """Return the folder of GP files. It may not exist."""
    return Path(os.environ.get(GP_DIR) or settings.state_dir / "gp").expanduser()


def build_definitions(settings: Settings) -> dg.Definitions:
    """Build all definitions of the code location, for the given settings and the environment.

    Without a folder of GP files, the catalog is simulated. A folder that is configured but does not exist is
    an error of the sensor and of the runs that read it: it may be a file system that is not mounted now.
    Raises ConfigurationError for an invalid environment variable.
    """
    folder = gp_folder(settings)
    provider = gp_provider(settings)
    if provider is not None:
        folder.mkdir(parents=True, exist_ok=True)
    has_folder = bool(os.environ.get(GP_DIR)) or folder.is_dir()
    gp = GpSource(catalogue_dir=str(folder) if has_folder else None)
    graph = dg.Definitions(
        assets=fusion_assets,
        asset_checks=fusion_checks,
        jobs=fusion_jobs,
        schedules=[*fusion_schedules, pull_schedule(running=provider is not None)],
        sensors=fusion_sensors,
        resources={"gp": gp, "gp_provider": provider or GpProvider()},
        # One process per run: a process per step would add its start time, and Spark does the heavy work.
        executor=dg.in_process_executor,
    )
    maintenance = maintenance_definitions(["sda"], settings=settings)
    return branchlake_definitions(
        settings, dg.Definitions.merge(graph, sensor_measurements(settings), maintenance)
    )
