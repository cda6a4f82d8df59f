"""The command `branchlake set-aside`, which lists, retries and ends parked runs.

A run is parked after several failed attempts to judge or publish it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagster import DagsterInstance, DagsterRun
from rich.console import Console
from rich.table import Table

from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.parked_runs import discard_parked_run, iter_parked_runs, retry_parked_run
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count


@contextmanager
def _open_instance(settings: Settings) -> Iterator[DagsterInstance]:
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        yield instance


def gather_parked_runs(settings: Settings) -> list[dict[str, Any]]:
    """Collect the parked runs with branch, number of attempts and reason. Starts nothing."""
    with _open_instance(settings) as instance:
        return [
            {
                "run_id": run.run_id,
                "branch": run.tags.get(RunTag.BRANCH),
                "attempts": int(run.tags.get(RunTag.ATTEMPTS, "0")),
                "reason": run.tags.get(RunTag.REASON, ""),
            }
            for run in iter_parked_runs(instance)
        ]


def show_parked_runs(runs: list[dict[str, Any]]) -> None:
    """Print the runs of `gather_parked_runs` as a table."""
    console = Console()
    if not runs:
        console.print("No run is set aside.")
        return
    table = Table("run", "branch", "attempts", "reason", title=f"{format_count(len(runs), 'run')} set aside")
    for run in runs:
        table.add_row(run["run_id"], run["branch"], str(run["attempts"]), run["reason"])
    console.print(table)
    console.print(
        "To try a run again: branchlake set-aside retry RUN. To discard its branch: branchlake set-aside"
        " end RUN."
    )


def retry_run(settings: Settings, run_id: str) -> str:
    """Let the publication sensor try a parked run again. Return a message for the user.

    Raises ConfigurationError if `run_id` is not the start of the id of one parked run.
    """
    with _open_instance(settings) as instance:
        retry_parked_run(instance, _find_parked_run(instance, run_id))
    return f"The next tick of the publication sensor tries run {run_id} again."


def end_run(settings: Settings, run_id: str) -> str:
    """Discard the branch of a parked run and publish nothing. Return a message for the user.

    Raises ConfigurationError if `run_id` is not the start of the id of one parked run.
    """
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    with _open_instance(settings) as instance:
        return discard_parked_run(lake.nessie, instance, _find_parked_run(instance, run_id))


def _find_parked_run(instance: DagsterInstance, run_id: str) -> DagsterRun:
    runs_by_id = {run.run_id: run for run in iter_parked_runs(instance)}
    matches = [run for key, run in runs_by_id.items() if key.startswith(run_id)]
    if len(matches) != 1:
        raise ConfigurationError(
            f"{'Several runs' if matches else 'No run'} with the id {run_id!r}…"
            f" {'are' if matches else 'is'} set aside.",
            hint="List the runs and their ids: branchlake set-aside.",
        )
    return matches[0]
