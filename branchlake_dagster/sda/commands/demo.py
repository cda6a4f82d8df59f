"""`branchlake demo`: run the space pipeline once."""

from __future__ import annotations

import json
import sys

import click

from branchlake_dagster.cli.registry import interrupts_for_us_alone, print_progress
from branchlake_dagster.settings import Settings


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
@click.option(
    "--catalogue", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A TLE or OMM file."
)
@click.argument("more", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[FILE]...")
def demo(as_json: bool, catalogue: tuple[str, ...], more: tuple[str, ...]) -> None:
    """Run the space pipeline once, from start to end.

    Nine runs are published, and checks block one.

    --catalogue FILE… takes real TLE or OMM files (.gz too); without it 2,000 objects are simulated.
    """
    from branchlake_dagster.cli.server_starts import BackgroundServerStart

    settings, files = Settings(), [*catalogue, *more]
    with interrupts_for_us_alone():
        if not files:
            print_progress("Ten runs, one of which the gate blocks: 70 to 85 seconds on 2 idle cores.")
        starting = BackgroundServerStart(settings, say=print_progress)
        # Imported late, while the servers start, because the import takes as long.
        from branchlake_dagster.sda.commands.demo_run import print_result, run_demo

        result = run_demo(settings, files, say=print_progress, starting=starting)
    click.echo(json.dumps(result.as_dict(), indent=2)) if as_json else print_result(result)
    sys.exit(0 if result.as_expected else 1)
