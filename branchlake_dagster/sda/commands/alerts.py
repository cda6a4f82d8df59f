"""`branchlake sda alerts`: list the valid alerts, follow new entries, or acknowledge an alert."""

from __future__ import annotations

import getpass
import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import load_command_settings
from branchlake_dagster.cli.option_types import Moment
from branchlake_dagster.sda.alerts.entry_names import PRIORITIES
from branchlake_dagster.sda.commands.catalog_number import CATALOG_NUMBER
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from branchlake_dagster.sda.commands.alert_list import AlertFilter
    from branchlake_dagster.settings import Settings

_ROWS = 50
"""The number of rows in a table without `--limit`."""


@click.command()
@click.option("--priority", "priorities", type=click.Choice(PRIORITIES), multiple=True, help="Only these.")
@click.option(
    "--object", "objects", type=CATALOG_NUMBER, multiple=True, help="Catalog number; may be repeated."
)
@click.option(
    "--since",
    type=Moment(),
    help="Closest approach at or after this time. With --follow: a new subscriber gets what was published"
    " after this time; default: from now on.",
)
@click.option("--until", type=Moment(), help="Closest approach before this time.")
@click.option("--history", metavar="ALERT", help="List all entries of this alert, with retracted ones.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Most rows; 0: all. Default: {_ROWS} in a table, else all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --follow one document a line.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--follow", is_flag=True, help="Print new entries as they are published, until Ctrl-C.")
@click.option("--once", is_flag=True, help="With --follow: end when everything new was printed.")
@click.option(
    "--restart", is_flag=True, help="With --follow: forget the subscriber's position, and use --since."
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.05, max=86_400),
    default=1.0,
    show_default=True,
    help="With --follow: seconds between two looks.",
)
@click.option("--ack", "acknowledged_id", metavar="ALERT", help="Acknowledge this alert.")
@click.option("--subscriber", metavar="NAME", help="Who follows or acknowledges; default: your login name.")
@click.option("--note", help="With --ack: a remark.")
def alerts(
    priorities: tuple[str, ...],
    objects: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    history: str | None,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    follow: bool,
    once: bool,
    restart: bool,
    interval_s: float,
    acknowledged_id: str | None,
    subscriber: str | None,
    note: str | None,
) -> None:
    """List, follow and acknowledge conjunction alerts.

    Lists the alerts that hold now. --follow delivers each new entry at least once: the subscriber's position
    is saved after the entries were printed. --ack acknowledges the version of an alert that holds.

    \b
    branchlake sda alerts --priority high --since 2026-08-11T12:00
    branchlake sda alerts --follow --json --subscriber operations
    branchlake sda alerts --ack 7a4c1a0e-58c3-5c8e-9f0e-2d9f4c7b6e11 --note "maneuver planned"
    """
    listing_options = bool(priorities or objects or until or history or limit is not None or as_csv)
    if sum((follow, acknowledged_id is not None, history is not None)) > 1:
        raise click.UsageError("Give only one of --follow, --ack and --history.")
    if follow and listing_options:
        raise click.UsageError("--follow prints all new entries: give it no filter, --limit or --csv.")
    if follow and since is not None and since > datetime.now(UTC):
        raise click.BadParameter("With --follow, the time must not be in the future.", param_hint="--since")
    if not follow and (once or restart):
        raise click.UsageError("--once and --restart belong to --follow.")
    if acknowledged_id is not None and (listing_options or as_json or since):
        raise click.UsageError("--ack takes only --subscriber and --note.")
    if not math.isfinite(interval_s):
        raise click.UsageError("--interval takes a number of seconds.")
    if note is not None and not note.isprintable():
        raise click.UsageError("--note takes one line of printable text.")
    if acknowledged_id is None and note is not None:
        raise click.UsageError("--note belongs to --ack.")
    if as_json and as_csv:
        raise click.UsageError("Give only one of --json and --csv.")
    if subscriber is not None and not follow and acknowledged_id is None:
        raise click.UsageError("--subscriber belongs to --follow and --ack.")

    settings = load_command_settings(None).settings
    if subscriber is None:
        subscriber = _login_name()
    if follow:
        _follow(settings, subscriber, since, restart, as_json, interval_s, once)
    elif acknowledged_id is not None:
        _acknowledge(settings, acknowledged_id, subscriber, note)
    else:
        from branchlake_dagster.sda.commands.alert_list import AlertFilter

        alert_filter = AlertFilter(priorities, objects, since, until, history)
        _list(settings, alert_filter, limit=limit, as_json=as_json, as_csv=as_csv)


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "default"


def _follow(
    settings: Settings,
    subscriber: str,
    since: datetime | None,
    restart: bool,
    as_json: bool,
    interval_s: float,
    once: bool,
) -> None:
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.sda.commands.alert_delivery import follow_alerts
    from branchlake_dagster.sda.commands.alert_reader import AlertReader
    from branchlake_dagster.sda.commands.alert_subscribers import SubscriberStore

    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    try:
        follow_alerts(
            AlertReader(lake),
            SubscriberStore(settings.state_dir),
            subscriber,
            since=since,
            restart=restart,
            as_json=as_json,
            interval_s=interval_s,
            once=once,
            report=lambda text: click.echo(text, err=True),
        )
    except KeyboardInterrupt:
        # The usual end. Entries after the last saved position are printed again next time.
        return


def _acknowledge(settings: Settings, alert_id: str, subscriber: str, note: str | None) -> None:
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.alert_acknowledgement import (
        acknowledge_alert,
        report_acknowledgement,
    )
    from branchlake_dagster.sda.commands.alert_subscribers import SubscriberStore

    acknowledgement = acknowledge_alert(
        connect(settings),
        SubscriberStore(settings.state_dir),
        alert_id,
        subscriber,
        note=note,
        now=datetime.now(UTC),
    )
    is_reported = report_acknowledgement(settings, acknowledgement)
    click.echo(
        f"Sequence {acknowledgement.sequence} of alert {alert_id} is acknowledged by {subscriber}"
        + (", also on the asset's page in Dagster." if is_reported else "."),
        err=True,
    )


def _list(
    settings: Settings, alert_filter: AlertFilter, *, limit: int | None, as_json: bool, as_csv: bool
) -> None:
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.alert_list import (
        alert_to_json,
        csv_columns,
        flatten_for_csv,
        read_alerts,
        show_alerts,
    )
    from branchlake_dagster.sda.commands.alert_subscribers import SubscriberStore, latest_acknowledgements
    from branchlake_dagster.sda.commands.row_output import print_csv, print_csv_header

    is_history = alert_filter.alert_id is not None
    listing = read_alerts(connect(settings), alert_filter, history=is_history)
    acknowledgements = latest_acknowledgements(SubscriberStore(settings.state_dir).load_acknowledgements())
    entries = listing.entries
    if entries is None:
        if as_json:
            click.echo("[]")
        elif as_csv:
            print_csv_header(csv_columns())
        click.echo(f"No alert was published yet. Read at {listing.label}.", err=True)
        return
    shown = entries.head(limit) if limit else entries
    if as_json:
        rows = [alert_to_json(entry, acknowledgements) for entry in shown.iter_rows(named=True)]
        click.echo(json.dumps(rows, indent=2))
    elif as_csv:
        print_csv(flatten_for_csv(shown, acknowledgements))
    else:
        show_alerts(shown, acknowledgements, history=is_history, limit=_ROWS if limit is None else limit)
    noun = ("entry", "entries") if is_history else ("alert", "alerts")
    click.echo(f"{format_count(entries.height, *noun)}. Read at {listing.label}.", err=True)
