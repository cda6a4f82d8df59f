"""Jobs that tell which process they run in, and how they can end badly. Copied, so that a test may edit it."""

import os
import random
import time
from importlib import import_module
from pathlib import Path

import dagster as dg
import numpy as np
from alembic.script import ScriptDirectory

from branchlake_dagster.internals.dagster_sqlite import STORAGES

IMPORTED_BY = os.getpid()
VERSION = "first"


@dg.op
def tell(context: dg.OpExecutionContext) -> None:
    """One line of facts as the run's tags."""
    print("printed by the step")  # noqa: T201 - what is printed is kept
    facts = {
        "imported_by": IMPORTED_BY,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "version": VERSION,
        "random": random.random(),
        "numpy": np.random.random(),
        "cwd": str(Path.cwd()),
        "variable": os.environ.get("LAUNCH_TEST", ""),
        "revisions_by": ScriptDirectory.from_config.__module__,
        "engines_by": import_module(STORAGES[0]).create_engine.__module__,
    }
    context.instance.add_run_tags(context.run_id, {name: str(value) for name, value in facts.items()})


@dg.op(config_schema={"release": dg.Field(str, default_value=os.environ.get("LAUNCH_TEST_RELEASE", ""))})
def wait(context: dg.OpExecutionContext) -> None:
    """Until the file is there."""
    Path(context.op_config["release"] + ".waiting").write_text(str(os.getpid()))
    while not Path(context.op_config["release"]).exists():
        time.sleep(0.02)


@dg.op
def leave() -> None:
    """End the process as if all were well."""
    os._exit(0)


@dg.job(executor_def=dg.in_process_executor)
def telling() -> None:
    """Ends well."""
    tell()


@dg.job(executor_def=dg.multiprocess_executor)
def telling_elsewhere() -> None:
    """With a process for its step."""
    tell()


@dg.job(executor_def=dg.in_process_executor)
def waiting() -> None:
    """Ends when it may."""
    wait()


@dg.job(executor_def=dg.in_process_executor)
def leaving() -> None:
    """Its process ends before the run does."""
    leave()


defs = dg.Definitions(jobs=[telling, telling_elsewhere, waiting, leaving])
