"""A process of the real histories: a live run, or a run of one batch and its publication, until it is killed."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.run_publication import publish

PROJECT = "branchlake_dagster_tests.ingest.project"


def work(what: str, environment: Mapping[str, str], log: str, dies: str = "") -> None:
    """`what` is `live` or `batch`; it `dies` before or after its next publication."""
    # The fork server keeps the environment of the test that was the first to need it.
    for name in [one for one in os.environ if one.startswith("BRANCHLAKE_")]:
        del os.environ[name]
    os.environ.update(environment)
    with Path(log).open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if dies:
        _die(dies)
    project: Any = importlib.import_module(PROJECT)  # it reads the environment
    job = project.defs.resolve_job_def(f"ingest_{project.ingest.name}_{'live' if what == 'live' else 'job'}")
    with dg.DagsterInstance.get() as instance:
        done = job.execute_in_process(instance=instance, raise_on_error=False)
        if what == "batch":
            print(publish(done, project.defs, instance=instance), flush=True)  # noqa: T201 - the log
        sys.exit(0 if done.success else 1)


def _die(where: str) -> None:
    merge = NessieClient.merge

    def dying(*args: Any, **named: Any) -> Any:
        if where == "after":
            merge(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    NessieClient.merge = dying
