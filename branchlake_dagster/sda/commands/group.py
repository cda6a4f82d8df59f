"""`branchlake sda`."""

from __future__ import annotations

import click

from branchlake_dagster.cli.registry import CommandGroup

_SENSORS = "branchlake_dagster.sda.commands.sensors"
_CONJUNCTIONS = "branchlake_dagster.sda.commands.conjunctions"


@click.group(
    cls=CommandGroup,
    sources={
        "conjunctions": f"{_CONJUNCTIONS}:conjunctions",
        "receive": f"{_SENSORS}:receive",
        "screen-ephemeris": f"{_CONJUNCTIONS}:screen_ephemeris",
        "simulate": f"{_SENSORS}:simulate",
    },
)
def sda() -> None:
    """Work with the space pipeline.

    Close approaches, ephemerides, and the sensors that feed it, real or simulated.
    """
