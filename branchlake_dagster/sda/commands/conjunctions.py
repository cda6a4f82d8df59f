"""`branchlake sda conjunctions`: list close approaches, now or as they were published at an earlier time.

`branchlake sda screen-ephemeris`: compare ephemeris files with the catalog.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import load_command_settings
from branchlake_dagster.cli.option_types import FiniteRange, Moment
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from branchlake_dagster.query.connection import LakeReader
    from branchlake_dagster.sda.commands.conjunction_list import ConjunctionFilter

_KINDS = ("encounter", "edge", "together")


@click.command(name="conjunctions")
@click.option("--object", "objects", type=int, multiple=True, help="Catalog number; may be repeated.")
@click.option("--since", type=Moment(), help="Closest at or after this time.")
@click.option("--until", type=Moment(), help="Closest before this time.")
@click.option("--within", "within_km", type=FiniteRange(min=0), help="Largest miss distance, km.")
@click.option(
    "--kind", "kinds", type=click.Choice(_KINDS), multiple=True, help="Only this kind; may be repeated."
)
@click.option("--at", help="The list as of a time (without a zone: UTC) or a commit hash, instead of now.")
@click.option("--changes-since", help="What has changed since the list as of this time or commit hash.")
@click.option("--csv", "as_csv", is_flag=True, help="Print all rows as CSV.")
@click.option(
    "--cdm",
    "cdm_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write Conjunction Data Messages, one file each, to this folder.",
)
@click.option(
    "--cdm-format",
    type=click.Choice(("kvn", "xml")),
    default="kvn",
    show_default=True,
    help="Format of the messages.",
)
@click.option("--originator", help="Author of the messages: a registered abbreviation.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Most rows of the table; 0: all.",
)
def conjunctions(
    objects: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    within_km: float | None,
    kinds: tuple[str, ...],
    at: str | None,
    changes_since: str | None,
    as_csv: bool,
    cdm_folder: Path | None,
    cdm_format: str,
    originator: str | None,
    rows: int,
) -> None:
    """List predicted close approaches, nearest first.

    Starts nothing and changes nothing.

    \b
    branchlake sda conjunctions --object 25544 --since 2026-08-11T12:00
    branchlake sda conjunctions --within 0.5 --kind encounter --csv > near.csv
    branchlake sda conjunctions --object 25544 --changes-since 2026-08-11T06:00
    branchlake sda conjunctions --object 25544 --kind encounter --cdm messages --originator ABC
    """
    if cdm_folder is not None and (as_csv or changes_since is not None):
        raise click.UsageError("--cdm writes messages of a list: not with --csv or --changes-since.")
    if (cdm_folder is None) != (originator is None):
        raise click.UsageError("--cdm and --originator belong together: a message says who wrote it.")
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.conjunction_list import (
        ConjunctionFilter,
        compare_conjunctions,
        find_missing_list,
        listed_columns,
        print_conjunctions,
        read_conjunctions,
    )
    from branchlake_dagster.sda.commands.row_output import print_csv, print_csv_header

    reader = connect(load_command_settings(None).settings)
    wanted = ConjunctionFilter(objects, since, until, within_km, kinds)
    if label := find_missing_list(reader, at):
        if as_csv:
            print_csv_header(listed_columns(changes=changes_since is not None))
        click.echo(f"No close approach was published yet. Read at {label}.", err=True)
        return
    if cdm_folder is not None and originator is not None:
        _write_messages(reader, wanted, cdm_folder, at, cdm_format, originator)
        return
    if changes_since is None:
        found, read_at = read_conjunctions(reader, wanted, at=at)
    else:
        everything = ConjunctionFilter(objects)
        after, read_at = read_conjunctions(reader, everything, at=at)
        was = find_missing_list(reader, changes_since)
        before = after.clear()
        if was is None:
            before, was = read_conjunctions(reader, everything, at=changes_since)
        found, read_at = wanted.select_changes(compare_conjunctions(before, after)), f"{read_at}, since {was}"
    if as_csv:
        print_csv(found)
    else:
        print_conjunctions(found, rows)
    click.echo(
        f"{format_count(found.height, 'close approach', 'close approaches')}. Read at {read_at}.", err=True
    )


def _write_messages(
    reader: LakeReader,
    wanted: ConjunctionFilter,
    folder: Path,
    at: str | None,
    notation: str,
    originator: str,
) -> None:
    from branchlake_dagster.sda.commands.conjunction_messages import write_messages
    from branchlake_dagster.sda.messages.notation import Notation, identifier_item

    identifier_item("ORIGINATOR", originator)  # reports an invalid value before anything is read
    done = write_messages(
        reader,
        wanted,
        folder,
        at=at,
        notation=Notation(notation),
        originator=originator,
        now=lambda: datetime.now(UTC),
    )
    click.echo(
        f"{format_count(done.count, 'message', 'messages')} in {folder}. Read at {done.place}.", err=True
    )
    if done.refused:
        click.echo(done.format_refusals(), err=True)
        raise click.ClickException(
            f"{format_count(len(done.refused), 'row', 'rows')} could not be a message."
        )


@click.command(name="screen-ephemeris")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--since", type=Moment(), help="From this time on; else all that the file has.")
@click.option("--until", type=Moment(), help="Until this time.")
@click.option(
    "--within",
    "within_km",
    type=FiniteRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Largest miss distance, km.",
)
@click.option(
    "--exclude",
    type=int,
    multiple=True,
    help="Catalog number to leave out: the object itself, its parts.",
)
@click.option(
    "--max-age",
    "max_age_days",
    type=FiniteRange(min=0, min_open=True),
    default=14.0,
    show_default=True,
    help="Objects with elements that many days from the begin are left out.",
)
@click.option("--at", help="The catalogue as of a time (without a zone: UTC) or a commit hash.")
@click.option("--csv", "as_csv", is_flag=True, help="Print all rows as CSV.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Most rows of the table; 0: all.",
)
def screen_ephemeris(
    files: tuple[Path, ...],
    since: datetime | None,
    until: datetime | None,
    within_km: float,
    exclude: tuple[int, ...],
    max_age_days: float,
    at: str | None,
    as_csv: bool,
    rows: int,
) -> None:
    """Screen ephemeris files against the catalog.

    Lists their close approaches with published objects. The files are CCSDS OEM, in KVN or XML. Starts
    nothing and changes nothing. Nothing is extrapolated: gaps between segments are not screened.

    \b
    branchlake sda screen-ephemeris station.oem --exclude 25544 --within 10
    """
    from branchlake_dagster.query import connect
    from branchlake_dagster.sda.commands.ephemeris_screening import screen_files

    screen_files(
        connect(load_command_settings(None).settings),
        files,
        since=since,
        until=until,
        within_km=within_km,
        exclude=exclude,
        max_age_days=max_age_days,
        at=at,
        as_csv=as_csv,
        rows=rows,
    )
