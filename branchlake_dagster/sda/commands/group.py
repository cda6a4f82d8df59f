"""The command group `branchlake sda`."""

from __future__ import annotations

import click

from branchlake_dagster.cli.registry import CommandGroup

_COMMANDS = "branchlake_dagster.sda.commands"
_SENSORS = "branchlake_dagster.sda.commands.sensors"
_CONJUNCTIONS = "branchlake_dagster.sda.commands.conjunctions"


@click.group(
    cls=CommandGroup,
    sources={
        "alerts": f"{_COMMANDS}.alerts:alerts",
        "conjunctions": f"{_CONJUNCTIONS}:conjunctions",
        "observations": f"{_COMMANDS}.measurements:observations",
        "receive": f"{_SENSORS}:receive",
        "screen-ephemeris": f"{_CONJUNCTIONS}:screen_ephemeris",
        "simulate": f"{_SENSORS}:simulate",
        "tracks": f"{_COMMANDS}.measurements:tracks",
    },
)
def sda() -> None:
    """Work with the space pipeline.

    Alerts, close approaches, ephemerides, tracks, and the sensors that feed it, real or simulated.
    """
