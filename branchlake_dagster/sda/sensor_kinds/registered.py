"""The kinds of sensor in this package, and the selection of those that a code location reads."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.laser import LASER
from branchlake_dagster.sda.sensor_kinds.links import LINKS
from branchlake_dagster.sda.sensor_kinds.optical import OPTICAL
from branchlake_dagster.sda.sensor_kinds.radar import RADAR
from branchlake_dagster.sda.sensor_kinds.sweep_radar import SWEEP_RADAR
from branchlake_dagster.sda.sensors.models import MeasurementModel

SENSOR_KINDS: tuple[SensorKind, ...] = (RADAR, OPTICAL, LINKS, SWEEP_RADAR, LASER)
"""All kinds of this package. A new kind must be added here."""

DEFAULT_SENSOR_KINDS: tuple[SensorKind, ...] = (RADAR, OPTICAL, LINKS)
"""The kinds of a code location that selects none: those that `branchlake sda simulate` sends."""


def select_sensor_kinds(wanted: str) -> tuple[SensorKind, ...]:
    """Return the kinds that a text names, such as ``radar, optical, my_package.lidar:LIDAR``.

    A part is the name of a kind of this package, ``default``, ``all``, or the module and the attribute of
    another `SensorKind`. An empty text is ``default``. A kind that is named twice counts once.

    Raises:
        ConfigurationError: A part is unknown, or two kinds have the same name.
    """
    by_name = {kind.name: kind for kind in SENSOR_KINDS}
    groups = {"default": DEFAULT_SENSOR_KINDS, "all": SENSOR_KINDS}
    chosen: list[SensorKind] = []
    for part in (text.strip() for text in wanted.split(",")):
        if ":" in part:
            found: Sequence[SensorKind] = [_load_sensor_kind(part)]
        elif part in by_name:
            found = [by_name[part]]
        elif part in groups or not part:
            found = groups[part or "default"] if part or not wanted.strip() else ()
        else:
            raise ConfigurationError(
                f"There is no kind of sensor {part!r}.",
                hint=f"Name some of {', '.join([*by_name, *groups])}, or module:NAME of a SensorKind.",
            )
        chosen += [kind for kind in found if not any(kind is other for other in chosen)]
    return unique_sensor_kinds(chosen)


def unique_sensor_kinds(kinds: Sequence[SensorKind]) -> tuple[SensorKind, ...]:
    """Return the kinds as a tuple, after a check of their names.

    Raises:
        ConfigurationError: There are none, or two kinds have the same name or `source_kind`.
    """
    names = Counter(name for kind in kinds for name in {("name", kind.name), ("source", kind.source_kind)})
    repeated = [name for (_, name), count in names.items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"Two kinds of sensor are named {repeated[0]}.", hint="Give each its own name and source_kind."
        )
    if not kinds:
        raise ConfigurationError("There is no kind of sensor.", hint="Name at least one.")
    return tuple(kinds)


def _load_sensor_kind(path: str) -> SensorKind:
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The kind of sensor {path} cannot be imported: {error}.",
            hint="Write module:NAME of a SensorKind that this process can import.",
        ) from error
    if not isinstance(kind, SensorKind):
        raise ConfigurationError(
            f"{path} is a {type(kind).__name__}, not a SensorKind.", hint="Write module:NAME of a SensorKind."
        )
    return kind


def measurement_models(kinds: Sequence[SensorKind]) -> Mapping[str, MeasurementModel]:
    """Return the measurement models by source kind."""
    return {kind.source_kind: kind.model for kind in kinds}
