"""The benchmarks of the space pipeline, as commands of `branchlake bench`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import click

from branchlake_dagster.cli.registry import print_progress
from branchlake_dagster.settings import Settings


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--hours", default=1.0, show_default=True, help="Length of the window.")
@click.option("--seed", default=2026, show_default=True, help="Seed of the observations.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def association(as_json: bool, hours: float, seed: int, files: tuple[Path, ...]) -> None:
    """Compare associations of observations with the truth.

    Simulates all kinds of sensors, with 5 % wrong track numbers and 1 % clutter.

    FILES are GP files in the order of time, three or more. The last file is the truth, and the file before it
    the prediction. All files except the last are the history of errors. Without files, 16,000 objects are
    simulated.
    """
    from branchlake_dagster.sda.benchmarks.association import measure_association, show_association

    if len(files) in (1, 2):
        raise click.UsageError("Name three or more GP files, or none.")
    figures = measure_association(files, hours=hours, seed=seed, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_association(figures)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--hours", default=1.0, show_default=True, help="Length of the window.")
@click.option("--seed", default=2026, show_default=True, help="Seed of the observations.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def tracks(as_json: bool, hours: float, seed: int, files: tuple[Path, ...]) -> None:
    """Compare fused tracks with the truth, single sensors and element sets.

    Simulates all kinds of sensors, with 5 % wrong track numbers and 1 % clutter, and associates them first.

    FILES are GP files in the order of time, three or more. The last file is the truth, and the file before it
    has the element sets. All files except the last are the history of errors. Without files, 4,000 objects
    are simulated.
    """
    from branchlake_dagster.sda.benchmarks.tracks import measure_tracks, show_tracks

    if len(files) in (1, 2):
        raise click.UsageError("Name three or more GP files, or none.")
    figures = measure_tracks(files, hours=hours, seed=seed, say=print_progress)
    click.echo(json.dumps(figures, indent=2)) if as_json else show_tracks(figures)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rounds", default=3, show_default=True, help="Runs of the small asset; the median counts.")
def lifecycle(as_json: bool, rounds: int) -> None:
    """Time a run from its launch to its publication."""
    from branchlake_dagster.sda.benchmarks.lifecycle import measure_lifecycle, print_lifecycle

    found = measure_lifecycle(Settings(), rounds=rounds, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_lifecycle(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--hours", default=24.0, show_default=True, help="How far ahead.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def screening(as_json: bool, hours: float, files: tuple[Path, ...]) -> None:
    """Time the screening of all objects against all.

    Measures the time until the publication, and repeats it after a second snapshot of the catalog.

    FILES are two GP files, the older one first. Without files, 16,000 objects are simulated.
    """
    from branchlake_dagster.sda.benchmarks.screening import measure_screening, print_screening

    if len(files) not in (0, 2):
        raise click.UsageError("Name two GP files, or none.")
    found = measure_screening(Settings(), files, hours=hours, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_screening(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--rows", default=500_000, show_default=True, help="Rows of a round's five pulls.")
@click.option("--rounds", default=3, show_default=True, help="Rounds that are counted; the median counts.")
def registry(as_json: bool, rows: int, rounds: int) -> None:
    """Time the merge of five providers' catalogs.

    Measures the time until the merged catalog is checked and published. Compares it with plain Spark and
    Polars.
    """
    from branchlake_dagster.sda.benchmarks.registry import measure_registry, print_registry

    found = measure_registry(Settings(), rows=rows, rounds=rounds, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_registry(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--seconds", default=5.0, show_default=True, help="Seconds of each measurement.")
@click.option("--roll-s", default=1.0, show_default=True, help="Age at which a landing file is finished.")
def receive(as_json: bool, seconds: float, roll_s: float) -> None:
    """Time the receivers of each protocol.

    Measures their throughput at full speed, and their delays at a steady rate.
    """
    from branchlake_dagster.sda.benchmarks.receiving import measure_receiving, print_receiving

    found = measure_receiving(seconds=seconds, roll_s=roll_s, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_receiving(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--seconds", default=600.0, show_default=True, help="How long the sensors measure.")
@click.option(
    "--bursts/--steady", default=True, show_default=True, help="Send ten times as much for some minutes."
)
def live(as_json: bool, seconds: float, bursts: bool) -> None:
    """Time simulated measurements from the network to main."""
    from branchlake_dagster.sda.benchmarks.live import measure_live, print_live

    found = measure_live(Settings(), seconds=seconds, bursts=bursts, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_live(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--hours", default=6.0, type=click.FloatRange(min=0.1), show_default=True, help="Length of the span."
)
@click.option("--threshold-km", default=5.0, show_default=True, help="The largest distance that counts.")
@click.option(
    "--start", type=click.DateTime(["%Y-%m-%dT%H:%M"]), help="UTC; after 99 % of the epochs if absent."
)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def agreement(
    as_json: bool, hours: float, threshold_km: float, start: datetime | None, file: Path | None
) -> None:
    """Compare the screening with brute force, event by event.

    FILE is a GP file, OMM in CSV or TLE. Without a file, 2,000 objects are simulated.
    """
    from branchlake_dagster.sda.benchmarks.agreement import measure_agreement, print_agreement

    begin = start.replace(tzinfo=UTC) if start else None
    found = measure_agreement(file, start=begin, hours=hours, threshold_km=threshold_km, say=print_progress)
    click.echo(json.dumps(found, indent=2)) if as_json else print_agreement(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--observations",
    default=250_000,
    type=click.IntRange(min=1_000),
    show_default=True,
    help="Observations of the smaller input; the larger one has four times as many.",
)
@click.option("--seed", default=2026, show_default=True, help="Seed of the sensors.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def sda(as_json: bool, observations: int, seed: int, files: tuple[Path, ...]) -> None:
    """Time the space pipeline from bytes to alerts.

    Compares it with plain Spark. Also measures the quality of associations and tracks, and times the
    registry and the screening.

    FILES are GP files in the order of time, three or more, for the quality as in `bench tracks`. The last
    file is also used for the screening. Without files, objects are simulated.
    """
    from branchlake_dagster.sda.benchmarks.sensor_pipeline import measure_space_pipeline, show_space_pipeline

    if len(files) in (1, 2):
        raise click.UsageError("Name three or more GP files, or none.")
    figures = measure_space_pipeline(
        Settings(), files, observations=observations, seed=seed, say=print_progress
    )
    click.echo(json.dumps(figures, indent=2)) if as_json else show_space_pipeline(figures)
