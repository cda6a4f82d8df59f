"""`branchlake conjunctions`: what is ahead of an object, now or as it was published at some moment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

_KINDS = ("encounter", "edge", "together")


class _Moment(click.ParamType[datetime]):
    """A time; without a zone: UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            found = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time: write it as 2026-11-20T12:00.", param, ctx)
        return found if found.tzinfo else found.replace(tzinfo=UTC)


def add_to(main: click.Group) -> Callable[..., Any]:
    """The command, as one of `main`."""
    return main.command(name="conjunctions")(_conjunctions)


@click.option("--object", "objects", type=int, multiple=True, help="Catalogue number; may be repeated.")
@click.option("--since", type=_Moment(), help="Closest at or after this time.")
@click.option("--until", type=_Moment(), help="Closest before this time.")
@click.option("--within", "within_km", type=click.FloatRange(min=0), help="Largest miss distance, km.")
@click.option("--kind", "kinds", type=click.Choice(_KINDS), multiple=True, help="Only such.")
@click.option("--at", help="The list as of a time (without a zone: UTC) or a commit hash, instead of now.")
@click.option("--changes-since", help="What has changed since the list as of this time or commit hash.")
@click.option("--csv", "as_csv", is_flag=True, help="All of it as CSV.")
@click.option("--rows", default=50, show_default=True, help="Most rows of the table; 0: all.")
def _conjunctions(
    objects: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    within_km: float | None,
    kinds: tuple[str, ...],
    at: str | None,
    changes_since: str | None,
    as_csv: bool,
    rows: int,
) -> None:
    r"""Close approaches that are ahead, nearest first. Starts nothing and changes nothing.

    \b
    branchlake conjunctions --object 25544 --since 2026-08-11T12:00
    branchlake conjunctions --within 0.5 --kind encounter --csv > near.csv
    branchlake conjunctions --object 25544 --changes-since 2026-08-11T06:00
    """
    from branchlake_dagster.cli.conjunctions.listing import Wanted, compared, listed
    from branchlake_dagster.cli.conjunctions.shown import show
    from branchlake_dagster.query import connect

    reader = connect(Settings())
    wanted = Wanted(objects, since, until, within_km, kinds)
    if changes_since is None:
        found, told = listed(reader, wanted, at=at)
    else:
        everything = Wanted(objects)
        after, told = listed(reader, everything, at=at)
        before, was = listed(reader, everything, at=changes_since)
        found, told = wanted.of(compared(before, after)), f"{told}, since {was}"
    if as_csv:
        sys.stdout.write(found.write_csv(datetime_format="%Y-%m-%dT%H:%M:%S%.6fZ"))
    else:
        show(found, rows)
    click.echo(f"{counted(found.height, 'close approach', 'close approaches')}. Read at {told}.", err=True)
