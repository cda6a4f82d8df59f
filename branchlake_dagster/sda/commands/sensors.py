"""The commands `branchlake sda receive` and `branchlake sda simulate`, with their options."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from branchlake_dagster.cli.option_types import FiniteRange, Moment, NamedFolder

_KINDS = ("radar", "optical", "isl")


class _Address(click.ParamType[tuple[str, int]]):
    """An option with a host and a port."""

    name = "host:port"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        host, colon, port = str(value).rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65_535:
            self.fail(f"{value!r} is not an address: write it as 127.0.0.1:9101.", param, ctx)
        return host.strip("[]"), int(port)


class _Rate(click.ParamType[tuple[str, float]]):
    """An option with a kind of sensor and its measurements per second."""

    name = "kind=number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        kind, _, number = str(value).partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if kind not in _KINDS or not 0 <= rate < 1e7:
            self.fail(f"{value!r} is not a rate: write it as radar=5000.", param, ctx)
        return kind, rate


_MAX_PARTITION = (1 << 31) - 1_000
"""Partitions are numbers of 32 bits, and each further source has the next one."""


def _one_sink(landing: Path | None, kafka: str | None) -> None:
    if kafka is not None and not kafka.strip():
        raise click.BadParameter("Name at least one broker, as 127.0.0.1:9092.", param_hint="--kafka")
    if (landing is None) == (kafka is None):
        raise click.UsageError("Name where it goes: --landing FOLDER or --kafka BROKERS, one of them.")


@click.command()
@click.option("--radar", type=_Address(), multiple=True, help="Listen here for radar datagrams (UDP).")
@click.option("--optical", multiple=True, help="Ask this URL for pages of optical measurements (HTTP).")
@click.option("--isl", type=_Address(), multiple=True, help="Listen here for links' connections (TCP).")
@click.option("--landing", type=NamedFolder(), help="Write files here.")
@click.option("--kafka", metavar="BROKERS", help="Produce to these brokers, as host:port,host:port.")
@click.option(
    "--kafka-options",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of librdkafka's options (security.protocol, sasl.*, ssl.*), key=value.",
)
@click.option("--topics", default="sda.", show_default=True, help="First part of the topics' names.")
@click.option(
    "--name", default="receiver", show_default=True, help="The receiver's name in each record's headers."
)
@click.option(
    "--first-partition",
    type=click.IntRange(min=0, max=_MAX_PARTITION),
    default=0,
    show_default=True,
    help="First partition of each topic.",
)
@click.option(
    "--monitor", type=_Address(), default="127.0.0.1:9464", show_default=True, help="/health, /metrics."
)
@click.option(
    "--roll-s",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Age at which a landing file is finished.",
)
@click.option(
    "--buffer",
    type=click.IntRange(min=1),
    default=200_000,
    show_default=True,
    help="Most records between source and sink.",
)
@click.option(
    "--drop",
    type=click.Choice(["oldest", "newest"]),
    default="oldest",
    show_default=True,
    help="What UDP drops if full.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=1),
    default=1_000,
    show_default=True,
    help="Most connections of a TCP address.",
)
@click.option(
    "--connections-per-peer",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="The same from one sender's address.",
)
@click.option("--allow", metavar="CIDR", multiple=True, help="Accept UDP and TCP from this network only.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable: a line when ready, one at the end.")
def receive(as_json: bool, **options: Any) -> None:
    """Receive sensors' messages until Ctrl-C.

    SIGTERM, Ctrl-C or a closed terminal ends it in less than five seconds, after the received messages were
    handed over. The exit code is 1 if a received message was not handed over.
    """
    from branchlake_dagster.sda.commands.receive import Wanted, run_receivers

    _one_sink(options["landing"], options["kafka"])
    wanted = Wanted(**options)
    if not (wanted.radar or wanted.optical or wanted.isl):
        raise click.UsageError("Name a source: --radar, --optical or --isl.")
    done = run_receivers(wanted, as_json=as_json, say=lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({"event": "ended", "intakes": done.intakes}))
    sys.stdout.flush()
    code = 0 if done.complete else 1
    if not done.finished:
        # The thread of a sink still writes, and a normal exit would wait for it.
        os._exit(code)
    sys.exit(code)


@click.command()
@click.option("--radar", type=_Address(), help="Send radar datagrams there (UDP).")
@click.option("--optical", type=_Address(), help="Serve pages of optical measurements here (HTTP).")
@click.option("--isl", type=_Address(), help="Connect to there with frames of links (TCP).")
@click.option("--landing", type=NamedFolder(), help="Write files, without network.")
@click.option("--kafka", metavar="BROKERS", help="Produce to these brokers, without receivers.")
@click.option(
    "--kafka-options",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of librdkafka's options, key=value.",
)
@click.option("--topics", default="sda.", show_default=True, help="What names of topics begin with.")
@click.option(
    "--paced", is_flag=True, help="Into files or Kafka: at the time of sending, not as fast as it goes."
)
@click.option(
    "--rate", "rates", type=_Rate(), multiple=True, help="Per second, as radar=5000; may be repeated."
)
@click.option(
    "--seconds", type=FiniteRange(min=0, min_open=True), help="How long; default: until it is ended."
)
@click.option("--start", type=Moment(), help="First instant (without a zone: UTC); default: now.")
@click.option(
    "--seed", default=2026, show_default=True, help="Everything random follows from it and the start."
)
@click.option(
    "--objects",
    type=click.IntRange(min=1),
    default=2_000,
    show_default=True,
    help="Number of simulated objects.",
)
@click.option(
    "--catalogue",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A GP file instead of a simulated catalogue.",
)
@click.option("--duplicates", default=0.001, show_default=True, help="Share that is sent twice.")
@click.option(
    "--stragglers",
    default=0.001,
    show_default=True,
    help="Share that arrives later than allowed.",
)
@click.option(
    "--corrupted",
    default=0.001,
    show_default=True,
    help="Share whose bytes are damaged.",
)
@click.option(
    "--burst-every-s",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds between bursts; 0: none.",
)
@click.option(
    "--burst-first-s",
    type=FiniteRange(min=0),
    default=60.0,
    show_default=True,
    help="Start of the first burst.",
)
@click.option(
    "--burst-s", type=FiniteRange(min=0), default=60.0, show_default=True, help="Length of a burst."
)
@click.option(
    "--burst-factor",
    type=FiniteRange(min=0),
    default=10.0,
    show_default=True,
    help="How much more in a burst.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Connections of the links.",
)
@click.option(
    "--fault-every",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Every this many requests, answer with a fault; 0: never.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def simulate(
    as_json: bool, rates: tuple[tuple[str, float], ...], start: datetime | None, **options: Any
) -> None:
    """Send messages of simulated sensors.

    A network of radars, telescopes and inter-satellite links is simulated. Its messages go over the network
    or to topics.
    """
    from branchlake_dagster.sda.commands.simulate import Simulated, print_counts, run_simulation

    over = {kind: options[kind] for kind in _KINDS if options[kind] is not None}
    direct = options["landing"] is not None or options["kafka"] is not None
    if bool(over) == direct:
        raise click.UsageError("Name --radar, --optical or --isl, or else --landing or --kafka.")
    if direct:
        _one_sink(options["landing"], options["kafka"])
        if options["seconds"] is None and not options["paced"]:
            raise click.UsageError("Without --seconds it would fill the disk: say how long, or --paced.")
    for name in ("duplicates", "stragglers", "corrupted"):
        if not 0 <= options[name] <= 0.5:
            raise click.BadParameter("A share is between 0 and 0.5.", param_hint=f"--{name}")
    found = run_simulation(
        Simulated(rates=dict(rates), start=start, **options),
        say=lambda text: click.echo(text, err=True),
    )
    click.echo(json.dumps(found, indent=2)) if as_json else print_counts(found)
