"""What `branchlake doctor` looks at in Dagster: its home, its storage, its web server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from dagster import DagsterInstance, RunsFilter

from branchlake_dagster.cleanup.reaper_rules import Reaping, ReapingAction, RunState
from branchlake_dagster.cli.doctor.examination import Examination
from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.extras import require
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.cleanup_jobs import limits_of, reap_branches
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.failure_detector import Liveness
from branchlake_dagster.runs.run_tags import BRANCH_TAG, LAKE_TAG, STATUS_TAG, Status, publication_of
from branchlake_dagster.settings import RUN_BRANCH_PREFIX, Settings
from branchlake_dagster.wording import agree, counted, named

_NAMED = 5


class PublicationLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` does not hold a publication that Dagster knows of."""


def dagster(found: Examination, settings: Settings) -> None:
    """Nothing is made: a home that is not there is told, not prepared."""
    look = partial(found.look, "Dagster")
    named = os.environ.get("DAGSTER_HOME")
    home = Path(named) if named else settings.state_dir / "dagster"
    if not (home / "dagster.yaml").is_file():
        told = f"{home} has no dagster.yaml"
        found.note(
            "Dagster", "home", "off", told, "`branchlake up` writes one; docs/deployment.md has others."
        )
    elif look(
        "home", lambda: _writable(home), remedy="Make the folder writable or set DAGSTER_HOME."
    ) and look(
        "storage",
        lambda: _storage(home),
        remedy=f"Check {home / 'dagster.yaml'}, the variables it names and the database's address.",
    ):
        look(
            "newest publication",
            lambda: _newest_publication(home, settings),
            remedy="Check whether main was set back, or Nessie restored from an older copy. Runs whose branch"
            " still exists are published again; launch the others again.",
        )
        _note_ownerless_branches(found, home, settings)
    if find_spec("dagster_webserver") is None:
        remedy = "pip install 'branchlake_dagster[ui]', where the UI is to run."
        found.note("Dagster", "web server", "off", "dagster-webserver is not installed here", remedy)
    else:
        found.note("Dagster", "web server", "right", f"dagster-webserver {version('dagster-webserver')}")


def _writable(home: Path) -> str:
    if not home.is_absolute():
        raise ConfigurationError(f"DAGSTER_HOME is {home}, and Dagster takes an absolute path only.")
    if not os.access(home, os.R_OK | os.X_OK):
        raise ConfigurationError(f"{home} cannot be read.")
    return str(home)


def _storage(home: Path) -> str:
    with _postgres_errors(home), DagsterInstance.from_config(str(home)) as instance:
        runs = instance.get_runs_count()
        storages = {type(one).__name__ for one in (instance.run_storage, instance.event_log_storage)}
        return f"{' and '.join(sorted(storages))}, {counted(runs, 'run')}"


def _newest_publication(home: Path, settings: Settings) -> str:
    """The newest publication that Dagster knows; PublicationLost if `main` does not hold it.

    Costs one query to Dagster's run storage, and the log of `main` since that run started.
    """
    with DagsterInstance.from_config(str(home)) as instance:
        published = RunsFilter(tags={STATUS_TAG: str(Status.PUBLISHED), LAKE_TAG: settings.lake_id})
        newest = instance.get_run_records(published, limit=1, order_by="update_timestamp")
    if not newest:
        return "none yet"
    run = newest[0].dagster_run
    branch = run.tags.get(BRANCH_TAG, "")
    publication = publication_of(run.tags, branch)
    if publication is None:
        return f"of run {run.run_id}, which names no commit"
    try:
        publisher = publisher_of(Lakehouse(settings, start=False))
    except LakeNotRunning:
        return f"of run {run.run_id}; not compared with main, because the lake does not run"
    if not publisher.is_on_main(publication):
        raise PublicationLost(
            f"Dagster calls run {run.run_id} published, and main does not hold its publication.",
            branch=branch,
            run_id=run.run_id,
        )
    return f"of run {run.run_id}, on main"


def _note_ownerless_branches(found: Examination, home: Path, settings: Settings) -> None:
    """Add a finding for branches of runs that this Dagster instance does not know and nobody works on.

    Their instance may be gone for good, as a temporary `DAGSTER_HOME` is. Branches that were written to
    within `orphan_grace_min` are left out.
    """
    try:
        lake = Lakehouse(settings, start=False)
        with DagsterInstance.from_config(str(home)) as instance:
            decisions = list(reap_branches(lake, instance, dry_run=True))
    except (BranchlakeError, OSError):
        return  # it does not run, or the findings on Nessie and the warehouse say what is wrong
    branches = ownerless_branches(decisions, limits_of(settings).orphan_grace)
    if not branches:
        found.note("Dagster", "branches of other instances", "right", "none that nobody works on")
        return
    names = " ".join(f"--branch {one.branch}" for one in branches[:_NAMED])
    more = f" {len(branches) - _NAMED} more: `branchlake reap --dry-run`." if len(branches) > _NAMED else ""
    instances = sorted({one.instance for one in branches if one.instance})
    of = f", of {named('Dagster instance', instances)}" if instances else ""
    verb = agree(len(branches), "has a run", "have runs")
    found.note(
        "Dagster",
        "branches of other instances",
        "off",
        f"{counted(len(branches), 'branch', 'branches')} {verb} that this instance does not know{of}",
        f"If no other Dagster instance works on this lake any more, end them: branchlake reap {names}.{more}",
    )


def ownerless_branches(decisions: Sequence[Reaping], grace: timedelta) -> list[Reaping]:
    """The branches that the reaper keeps although nobody works on them, because their run is unknown here."""
    return [
        one
        for one in decisions
        if one.state is RunState.MISSING
        and one.action is ReapingAction.KEEP
        and one.branch.startswith(RUN_BRANCH_PREFIX)
        # A silent writer too: the heartbeat of a killed one stays, and `reap --branch` watches it first.
        and Liveness.ALIVE not in one.heartbeat
        and (one.age is None or one.age > grace)
    ]


@contextmanager
def _postgres_errors(home: Path) -> Iterator[None]:
    """Dagster's own error for a database that does not answer says only that it was asked too often."""
    if not re.search(r"^\s*(postgres:|module:\s*dagster_postgres)|\{postgres:", _text(home), re.MULTILINE):
        yield
        return
    require("postgres", "dagster_postgres", "psycopg2", wanted_by="Dagster's storage on Postgres")
    from dagster_postgres.utils import DagsterPostgresException

    try:
        yield
    except DagsterPostgresException as error:
        cause = error.__cause__ or error.__context__ or error
        raise ConfigurationError(
            f"The database does not answer: {str(cause).splitlines()[0].rstrip('.')}."
        ) from error


def _text(home: Path) -> str:
    return (home / "dagster.yaml").read_text()
