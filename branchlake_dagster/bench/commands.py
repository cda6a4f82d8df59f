"""The commands of `branchlake bench`. A command imports its dependencies when it runs."""

from __future__ import annotations

import json

import click

from branchlake_dagster.cli.registry import CommandGroup, print_progress
from branchlake_dagster.settings import Settings


@click.group(
    cls=CommandGroup,
    sources={
        "agreement": "branchlake_dagster.sda.benchmarks.commands:agreement",
        "association": "branchlake_dagster.sda.benchmarks.commands:association",
        "lifecycle": "branchlake_dagster.sda.benchmarks.commands:lifecycle",
        "live": "branchlake_dagster.sda.benchmarks.commands:live",
        "receive": "branchlake_dagster.sda.benchmarks.commands:receive",
        "registry": "branchlake_dagster.sda.benchmarks.commands:registry",
        "screening": "branchlake_dagster.sda.benchmarks.commands:screening",
        "sda": "branchlake_dagster.sda.benchmarks.commands:sda",
        "tracks": "branchlake_dagster.sda.benchmarks.commands:tracks",
    },
)
def bench() -> None:
    """Run a benchmark. docs/benchmarks.md has results."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rows", default=10_000_000, show_default=True, help="Rows of the partition.")
@click.option(
    "--rounds", default=5, show_default=True, help="Times that each way is timed; the median counts."
)
def checks(as_json: bool, rows: int, rounds: int) -> None:
    """Time checks by metadata, by pandera and by SQL.

    Checks twenty column rules from metadata, in one Spark job, and with pandera's own backend. Then runs
    one, two and five SQL checks.
    """
    from branchlake_dagster.bench.checks import measure_checks, show_checks

    figures = measure_checks(Settings(), rows=rows, rounds=rounds, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_checks(figures)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=80, show_default=True, help="Samples of each kind.")
@click.option("--branches", default=10_000, show_default=True, help="Branches to reconcile.")
@click.option("--waiting", default=1_000, show_default=True, help="Finished runs of one table.")
@click.option("--commits", default=50_000, show_default=True, help="Commits on main since a base.")
def publication(as_json: bool, rounds: int, branches: int, waiting: int, commits: int) -> None:
    """Time branches, publications and clean-up.

    Nessie's own calls are timed for comparison.
    """
    from branchlake_dagster.bench.publication import measure_publication, show_publication

    sizes = {"rounds": rounds, "branches": branches, "waiting": waiting, "commits": commits}
    figures = measure_publication(Settings(), **sizes, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_publication(figures)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--files", default=100_000, show_default=True, help="Files to collect among.")
@click.option("--references", default=100, show_default=True, help="Branches that may need them.")
@click.option("--small-files", default=200, show_default=True, help="Files of 1 MB to compact.")
@click.option("--rounds", default=3, show_default=True, help="Compactions of each kind; the median counts.")
@click.option("--commits", default=50_000, show_default=True, help="Commits on main since a base.")
@click.option("--snapshots", default=70_000, show_default=True, help="Snapshots of a table to expire.")
@click.option(
    "--live-minutes",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Minutes of live ingestion with maintenance; first without it, for at most 10. 0: none.",
)
def maintenance(
    as_json: bool,
    files: int,
    references: int,
    small_files: int,
    rounds: int,
    commits: int,
    snapshots: int,
    live_minutes: float,
) -> None:
    """Time the collection of files, compaction and long histories.

    Iceberg's own procedures on Spark are timed for comparison. Then a live ingestion and queries run first
    without and then with maintenance beside them.
    """
    from branchlake_dagster.bench.maintenance import measure_maintenance, show_maintenance

    figures = measure_maintenance(
        Settings(),
        files=files,
        references=references,
        small_files=small_files,
        rounds=rounds,
        commits=commits,
        snapshots=snapshots,
        live_minutes=live_minutes,
        say=print_progress,
    )
    click.echo(json.dumps(figures, indent=2)) if as_json else show_maintenance(figures)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=3, show_default=True, help="Days that are counted; the mean counts.")
@click.option(
    "--sizes",
    default="small,medium,large",
    show_default=True,
    help="Sizes to measure, comma-separated.",
)
def incremental(as_json: bool, rounds: int, sizes: str) -> None:
    """Compare incremental assets with a look-back.

    Times a pipeline of two stages that computes only what has changed, the same pipeline if it computes the
    last 14 days again, and change capture alone.
    """
    from branchlake_dagster.bench.incremental import measure_incremental, show_incremental
    from branchlake_dagster.bench.incremental_feed import SIZES

    names = sizes.split(",")
    if unknown_sizes := [name for name in names if name not in SIZES]:
        raise click.BadParameter(
            f"{unknown_sizes[0]!r} is not one of {', '.join(SIZES)}.", param_hint="--sizes"
        )
    figures = measure_incremental(Settings(), rounds=rounds, sizes=names, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_incremental(figures)


@bench.command()
@click.option(
    "--records", default=1_000_000, show_default=True, help="Records of the topic to ingest at full speed."
)
@click.option("--seconds", default=60.0, show_default=True, help="Seconds at each fixed rate.")
@click.option("--rounds", default=3, show_default=True, help="Rounds at full speed; the medians count.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON.")
def ingest(records: int, seconds: float, rounds: int, as_json: bool) -> None:
    """Compare Kafka ingestion with plain Spark.

    Ingests into one table and into ten, and with Spark Structured Streaming for comparison.
    """
    from rich.console import Console

    from branchlake_dagster.bench.ingestion import measure_ingestion, show_ingestion

    figures = measure_ingestion(
        Settings(), records=records, seconds=seconds, rounds=rounds, say=print_progress
    )
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        show_ingestion(figures, Console())


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--rounds", default=5, show_default=True, help="Times that each way is timed; the median counts."
)
def upserts(as_json: bool, rounds: int) -> None:
    """Time upserts into small and large tables.

    Each upsert runs as Spark's MERGE, without a JVM (as for assets with pandas, Polars and Arrow frames),
    and as PyIceberg's own upsert.
    """
    from branchlake_dagster.bench.upserts import measure_upserts, show_upserts

    figures = measure_upserts(Settings(), rounds=rounds, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_upserts(figures)
