"""`branchlake set-aside`: runs that wait for somebody to look at them; look, retry, end."""

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
from branchlake_dagster.publication.parked_runs import give_up, retry, set_aside
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import counted


@contextmanager
def _instance(settings: Settings) -> Iterator[DagsterInstance]:
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        yield instance


def gather(settings: Settings) -> list[dict[str, Any]]:
    """The runs with their branch, the number of attempts and the reason. Starts nothing."""
    with _instance(settings) as instance:
        return [
            {
                "run_id": run.run_id,
                "branch": run.tags.get(RunTag.BRANCH),
                "attempts": int(run.tags.get(RunTag.ATTEMPTS, "0")),
                "reason": run.tags.get(RunTag.REASON, ""),
            }
            for run in set_aside(instance)
        ]


def show(found: list[dict[str, Any]]) -> None:
    """The same for people."""
    console = Console()
    if not found:
        console.print("No run is set aside.")
        return
    table = Table("run", "branch", "attempts", "reason", title=f"{counted(len(found), 'run')} set aside")
    for one in found:
        table.add_row(one["run_id"], one["branch"], str(one["attempts"]), one["reason"])
    console.print(table)
    console.print("`branchlake set-aside retry RUN` tries again, `branchlake set-aside end RUN` gives it up.")


def retry_run(settings: Settings, run_id: str) -> str:
    """Let the next pass try it; what was done in a sentence. Raises ConfigurationError for another run."""
    with _instance(settings) as instance:
        retry(instance, _found(instance, run_id))
    return f"The next tick of the publication sensor tries run {run_id} again."


def end_run(settings: Settings, run_id: str) -> str:
    """Give it up; what was done in a sentence. Raises ConfigurationError for another run."""
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    with _instance(settings) as instance:
        return give_up(lake.nessie, instance, _found(instance, run_id))


def _found(instance: DagsterInstance, run_id: str) -> DagsterRun:
    waiting = {run.run_id: run for run in set_aside(instance)}
    matches = [run for key, run in waiting.items() if key.startswith(run_id)]
    if len(matches) != 1:
        raise ConfigurationError(
            f"{'Several runs' if matches else 'No run'} that {'are' if matches else 'is'} set aside"
            f" begin{'' if matches else 's'} with {run_id!r}.",
            hint="`branchlake set-aside` lists them.",
        )
    return matches[0]
