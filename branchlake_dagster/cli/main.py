"""The commands themselves. Errors that tell what to do end as one sentence, not as a stack trace."""

from __future__ import annotations

import json
import sys
import time
from copy import copy
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from branchlake_dagster.cli import backfill_commands as commands
from branchlake_dagster.cli import column_commands as columns
from branchlake_dagster.cli import reprocess, sql
from branchlake_dagster.cli.command_settings import MODULE_HELP, command_settings
from branchlake_dagster.cli.conjunctions import commands as conjunctions
from branchlake_dagster.cli.ending import ending_cleanly, interrupts_for_us_alone
from branchlake_dagster.cli.receiving import commands as receiving
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.settings import Settings


class _Commands(click.Group):
    """Turns our typed errors into a sentence and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Ended.")
            ctx.exit(130)
        except BranchlakeError as error:
            raise click.ClickException(str(error)) from error
        except ValidationError as error:
            told = "; ".join(
                f"BRANCHLAKE_{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()
            )
            raise click.ClickException(f"A setting is wrong: {told.rstrip('.')}.") from error
        except OSError as error:
            if error.errno == 28:
                raise click.ClickException(
                    f"The disk is full: {error}. Make room and run it again."
                ) from error
            raise


def say(text: str) -> None:
    """Progress goes to standard error, so that `--json` output stays clean."""
    click.echo(text, err=True)


_location = click.option("-m", "--module", help=MODULE_HELP)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="branchlake_dagster")
def main() -> None:
    """Run Dagster assets on their own branches of an Iceberg lake."""


@main.group()
def sda() -> None:
    """Work with the space pipeline.

    Close approaches, ephemerides, and the sensors that feed it, real or simulated.
    """


sql.add_to(main)
conjunctions.add_to(sda)
reprocess.add_to(main)
columns.add_to(main)
commands.add_to(main, time.time)
receiving.add_to(sda, ending_cleanly)
for moved in sda.commands.values():
    alias = copy(moved)  # as it was called before there was the group
    alias.hidden = True
    main.add_command(alias)


@main.command()
@click.option("--to", type=click.Path(file_okay=False), help="Copy them there too, those for S3 included.")
@click.option("--prepare", is_flag=True, help="Start the servers once, which makes later starts faster.")
def fetch(to: str | None, prepare: bool) -> None:
    """Download the jars of the embedded servers."""
    from branchlake_dagster.embedded.jars import copied
    from branchlake_dagster.embedded.servers import EmbeddedServers

    jars = EmbeddedServers(Settings(), say=say).fetch_jars(s3=to is not None)
    if to is not None:
        for path in copied(jars, Path(to)):
            click.echo(path)
    if prepare:
        from branchlake_dagster.cli.server_starts import prepare_starts

        try:
            prepare_starts(Settings(), say=say)
        except (OSError, BranchlakeError) as error:
            say(f"Later starts will not be faster: {error}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Create a Dagster project in FOLDER.

    Its example asset is written to a branch, checked, and published if the check passes.
    """
    from branchlake_dagster.cli.new import new_project

    for path in new_project(folder):
        click.echo(path)
    say(
        f"Next: cd {folder}; in a virtual environment pip install -e '.[dev]'; dg check defs; pytest; dg dev."
    )


@main.command()
@_location
@click.option("--with", "also", type=click.Choice(["kafka"]), multiple=True, help="Start that as well.")
def up(module: str | None, also: tuple[str, ...]) -> None:
    """Start the embedded servers.

    Servers that run already are left alone. DAGSTER_HOME is prepared as well, and printed.
    """
    from branchlake_dagster.cli.dagster_home import dagster_home
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.lakehouse.web_page import nessie_page, rest_catalogue

    settings = command_settings(module).settings
    home = dagster_home(settings)
    endpoints = Lakehouse(settings, say=say).endpoints()
    click.echo(f"Nessie   {endpoints.nessie_uri}")
    click.echo(f"Page     {nessie_page(endpoints, settings)}")
    if rest := rest_catalogue(endpoints, settings):
        click.echo(f"REST     {rest}")
    click.echo(f"Spark    {endpoints.spark_remote or 'classic sessions'}")
    click.echo(f"Lake     {settings.warehouse_uri}")
    click.echo(f"Dagster  DAGSTER_HOME={home}")
    if "kafka" in also:
        from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka

        kafka = EmbeddedKafka(settings, say=say)
        click.echo(f"Kafka    {kafka.up()}")
        if kafka.asks_for_a_password:
            click.echo(f"         its clients' login: {kafka.client_properties}")


@main.command()
@_location
def down(module: str | None) -> None:
    """Stop the embedded servers; data is kept."""
    from branchlake_dagster.cli.status import still_used
    from branchlake_dagster.embedded.servers import EmbeddedServers
    from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka

    settings = command_settings(module).settings
    if warning := still_used(settings):
        say(warning)
    stopped = (
        *EmbeddedServers(settings, say=say).down(),
        *(("kafka",) if EmbeddedKafka(settings).down() else ()),
    )
    click.echo(f"Stopped {' and '.join(stopped)}." if stopped else "Nothing was running.")


@main.command()
@_location
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(module: str | None, as_json: bool) -> None:
    """Show servers, run branches and publications.

    Each run branch is shown with its run, the run's state and its age. Starts nothing.
    """
    from branchlake_dagster.cli.status import gather, show

    lake = command_settings(module)
    found = gather(lake.settings, lake.text)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@main.command()
@click.argument("asset", required=False)
@click.option("--partitions", is_flag=True, help="List the partitions with something left, and why.")
@_location
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def consumers(asset: str | None, partitions: bool, module: str | None, as_json: bool) -> None:
    """Show what incremental tables have left to consume.

    Files are counted, and no row is read: a file that was rewritten for one deleted row counts all its rows,
    before and after. Such a number is shown as "at most".

    With ASSET, or with --partitions for all assets: each partition that has something left, its position, and
    why no run is launched for it.
    """
    if asset is None and not partitions:
        from branchlake_dagster.cli.consumers import gather, show

        found = gather(command_settings(module).settings)
        click.echo(json.dumps(found, indent=2)) if as_json else show(found)
        return
    from datetime import UTC, datetime

    from branchlake_dagster.cli.backfill import place
    from branchlake_dagster.cli.consumers import as_dicts, gather_partitions, show_partitions
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse

    at = datetime.now(UTC)
    with place(module) as where:
        settings = where.lake.effective()
        Lakehouse(settings, start=False).endpoints(spark=False)  # nothing is started to look at it
        listed = gather_partitions(where, asset, at)
    click.echo(json.dumps(as_dicts(listed, at), indent=2)) if as_json else show_partitions(listed, at)


@main.command()
@_location
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(module: str | None, as_json: bool) -> None:
    """Check addresses, versions and permissions.

    Says what to do about each thing that is wrong. Starts nothing; the exit code is 1 if something is wrong.
    """
    from branchlake_dagster.cli.doctor import as_dict, examine, show

    chosen = command_settings(module)
    found = examine(chosen.settings, chosen.source, chosen.trouble)
    click.echo(json.dumps(as_dict(found), indent=2)) if as_json else show(found)
    sys.exit(0 if found.healthy else 1)


@main.command()
@_location
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and why.")
@click.option(
    "--branch",
    "names",
    multiple=True,
    help="End this branch, or sweep this discarded- tag, although another Dagster instance made it.",
)
def reap(module: str | None, dry_run: bool, names: tuple[str, ...]) -> None:
    """Discard run branches that nobody will publish.

    Files of branches that were discarded long ago are deleted. Says why for each branch.

    A branch stays for as long as the settings of its run's code location say. The settings of this command
    hold for a branch that you name, and for runs of older versions, which have not recorded theirs.

    Waits for half a minute when a writer is silent, to tell whether it is dead; with --dry-run it does not.
    """
    from dagster import DagsterInstance

    from branchlake_dagster.cli.dagster_home import dagster_home
    from branchlake_dagster.cli.location import format_settings
    from branchlake_dagster.cli.reaping import show
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.publication.cleanup_jobs import end_named, reap_branches, sweep_discarded

    chosen = command_settings(module)
    settings = chosen.settings
    lake = Lakehouse(settings, say=say, start=False)
    lake.endpoints(spark=False)
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        if names:
            reaped, swept = end_named(lake, instance, names, dry_run=dry_run)
        else:
            reaped = list(reap_branches(lake, instance, dry_run=dry_run))
            swept = list(sweep_discarded(lake, instance, dry_run=dry_run))
    names_shown = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
    shown = format_settings(settings, names_shown, chosen.source)
    say(f"Settings for {'these branches' if names else 'runs that recorded none of their own'}: {shown}.")
    show(reaped, swept, dry_run=dry_run)


@main.group(name="set-aside", invoke_without_command=True)
@_location
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.pass_context
def set_aside(ctx: click.Context, module: str | None, as_json: bool) -> None:
    """List runs that could not be judged or published.

    They are set aside after several attempts; each is shown with what to do.
    """
    ctx.obj = module
    if ctx.invoked_subcommand is None:
        from branchlake_dagster.cli.set_aside import gather, show

        found = gather(command_settings(module).settings)
        click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@set_aside.command()
@click.argument("run_id")
@click.pass_obj
def retry(module: str | None, run_id: str) -> None:
    """Let the publication sensor try the run again."""
    from branchlake_dagster.cli.set_aside import retry_run

    click.echo(retry_run(command_settings(module).settings, run_id))


@set_aside.command()
@click.argument("run_id")
@click.pass_obj
def end(module: str | None, run_id: str) -> None:
    """Discard the run's branch and publish nothing."""
    from branchlake_dagster.cli.set_aside import end_run

    click.echo(end_run(command_settings(module).settings, run_id))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
@click.option(
    "--catalogue", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A TLE or OMM file."
)
@click.argument("more", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[FILE]...")
def demo(as_json: bool, catalogue: tuple[str, ...], more: tuple[str, ...]) -> None:
    """Run the space pipeline once, from start to end.

    Five runs are published, and the gate blocks one.

    --catalogue FILE… takes real TLE or OMM files (.gz too); without it 2,000 objects are simulated.
    """
    from branchlake_dagster.cli.server_starts import Starting

    settings, files = Settings(), [*catalogue, *more]
    with interrupts_for_us_alone():
        if not files:
            say("Six runs, one of which the gate blocks: about a minute on 2 idle cores.")
        starting = Starting(settings, say=say)
        # Late: it takes as long as the servers do.
        from branchlake_dagster.cli.demo import run_demo, show

        result = run_demo(settings, files, say=say, starting=starting)
    click.echo(json.dumps(result.as_dict(), indent=2)) if as_json else show(result)
    sys.exit(0 if result.as_expected else 1)


@main.group()
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Run a benchmark; docs/benchmarks.md has figures."""
    ctx.with_resource(ending_cleanly())


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=3, show_default=True, help="Runs of the small asset; the median counts.")
def lifecycle(as_json: bool, rounds: int) -> None:
    """Time a run from its launch to its publication."""
    from branchlake_dagster.bench.lifecycle import measure, show

    found = measure(Settings(), rounds=rounds, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rows", default=10_000_000, show_default=True, help="Rows of the partition.")
@click.option(
    "--rounds", default=5, show_default=True, help="Times that each way is timed; the median counts."
)
def checks(as_json: bool, rows: int, rounds: int) -> None:
    """Time checks by metadata, by pandera and by SQL.

    Twenty column rules are checked from metadata, in one job, and by pandera itself; then one, two and five
    SQL checks.
    """
    from branchlake_dagster.bench.checks import measure, show

    found = measure(Settings(), rows=rows, rounds=rounds, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=80, show_default=True, help="Samples of each kind.")
@click.option("--branches", default=10_000, show_default=True, help="Branches to reconcile.")
@click.option("--waiting", default=1_000, show_default=True, help="Finished runs of one table.")
@click.option("--commits", default=50_000, show_default=True, help="Commits on main since a base.")
def publication(as_json: bool, rounds: int, branches: int, waiting: int, commits: int) -> None:
    """Time branches, publications and clean-up.

    Each is timed beside Nessie's bare calls.
    """
    from branchlake_dagster.bench.publication import measure, show

    sizes = {"rounds": rounds, "branches": branches, "waiting": waiting, "commits": commits}
    found = measure(Settings(), **sizes, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=3, show_default=True, help="Days that are counted; the mean counts.")
@click.option(
    "--sizes",
    default="small,medium,large",
    show_default=True,
    help="Of small, medium, large; comma-separated.",
)
def incremental(as_json: bool, rounds: int, sizes: str) -> None:
    """Time incremental assets beside a look-back.

    A pipeline of two stages by changes, beside one that recomputes 14 days; and change capture alone.
    """
    from branchlake_dagster.bench.incremental.command import measure, show
    from branchlake_dagster.bench.incremental.playback import SIZES

    names = sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(SIZES)}.", param_hint="--sizes")
    found = measure(Settings(), rounds=rounds, sizes=names, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--hours", default=24.0, show_default=True, help="How far ahead.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def screening(as_json: bool, hours: float, files: tuple[Path, ...]) -> None:
    """Time the screening of all objects against all.

    To the publication, and again after another snapshot of the catalog.

    FILES are two GP files, the older one first; without them 16,000 objects are simulated.
    """
    from branchlake_dagster.bench.sda.screening import measure, show

    if len(files) not in (0, 2):
        raise click.UsageError("Name two GP files, or none.")
    found = measure(Settings(), files, hours=hours, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--records", default=1_000_000, show_default=True, help="Flat out, of a topic.")
@click.option("--seconds", default=60.0, show_default=True, help="At each rate.")
@click.option("--rounds", default=3, show_default=True, help="Flat out; the medians count.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON.")
def ingest(records: int, seconds: float, rounds: int, as_json: bool) -> None:
    """Time Kafka ingestion beside plain Spark.

    Into one table and into ten, beside Spark Structured Streaming.
    """
    from rich.console import Console

    from branchlake_dagster.bench.ingestion.ingest import measure, show

    found = measure(Settings(), records=records, seconds=seconds, rounds=rounds, say=say)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found, Console())


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rows", default=500_000, show_default=True, help="Rows of a round's five pulls.")
@click.option("--rounds", default=3, show_default=True, help="Rounds that are counted; the median counts.")
def registry(as_json: bool, rows: int, rounds: int) -> None:
    """Time the merge of five providers' catalogs.

    Merged, checked and published, beside bare Spark and Polars.
    """
    from branchlake_dagster.bench.sda.registry import measure, show

    found = measure(Settings(), rows=rows, rounds=rounds, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--rounds", default=5, show_default=True, help="Times that each way is timed; the median counts."
)
def upserts(as_json: bool, rounds: int) -> None:
    """Time upserts into small and larger tables.

    Each is done by Spark's MERGE, without a JVM as assets with pandas, Polars and Arrow frames do it, and by
    PyIceberg's own upsert.
    """
    from branchlake_dagster.bench.upserts import measure, show

    found = measure(Settings(), rounds=rounds, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command(name="receive")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
@click.option("--roll-s", default=1.0, show_default=True, help="Age at which a landing file is finished.")
def bench_receive(as_json: bool, seconds: float, roll_s: float) -> None:
    """Time the receivers of each protocol.

    At full speed, and their delays at a steady rate.
    """
    from branchlake_dagster.bench.receiving.command import measure, show

    found = measure(seconds=seconds, roll_s=roll_s, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)


@bench.command(name="live")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--seconds", default=600.0, show_default=True, help="How long the sensors measure.")
@click.option("--bursts/--steady", default=True, show_default=True, help="Ten times as much for minutes.")
def bench_live(as_json: bool, seconds: float, bursts: bool) -> None:
    """Time simulated sensors from network to main."""
    from branchlake_dagster.bench.receiving.live import measure, show

    found = measure(Settings(), seconds=seconds, bursts=bursts, say=say)
    click.echo(json.dumps(found, indent=2)) if as_json else show(found)
