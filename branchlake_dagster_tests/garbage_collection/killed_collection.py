"""One pass of a collector, run by test_killed_collections.py in a process of its own, which kills itself.

Arguments: the moment of the process's death, and the age of its present time in days. The environment names
the lake.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from branchlake_dagster.garbage_collection import warehouse_files
from branchlake_dagster.garbage_collection.candidate_spool import CandidateSelector
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.reachable_files import ReachableFiles
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.garbage_collection.collected_lake import MemoryHeartbeats


def die(*_: object) -> None:
    """Kill this process. Nothing that it would clean up is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(owner: Any, name: str, is_moment: Callable[..., bool] = lambda *_: True) -> None:
    """Let the process die when a method is called, at the first call with such arguments."""
    method = getattr(owner, name)

    def die_or_call(*args: Any, **options: Any) -> Any:
        if is_moment(*args):
            die()
        return method(*args, **options)

    setattr(owner, name, die_or_call)


def dies_after(owner: Any, name: str, is_moment: Callable[..., bool] = lambda *_: True) -> None:
    """Let the process die when a method has returned, at the first call with such arguments."""
    method = getattr(owner, name)

    def call_and_die(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        if is_moment(*args):
            die()
        return result

    setattr(owner, name, call_and_die)


def arrange_death(collector: FileCollector, moment: str) -> None:
    """Choose the moment. `append` is inside of a write to the journal, whose files no commit names."""
    journal, files = collector.journal, collector._files
    deletions = count()
    match moment:
        case "mark":
            dies_after(ReachableFiles, "add_states")
        case "list":
            dies_after(CandidateSelector, "add_folder")
        case "append":
            arrange_lost_commit(collector)
        case "plan files":
            dies_before(journal, "record_event", lambda _, event, *__: event == "planned")
        case "plan":
            dies_after(journal, "record_event", lambda _, event, *__: event == "planned")
        case "delete":
            dies_after(files, "_delete_one", lambda _: next(deletions) == 2)
        case "deletions":
            dies_before(journal, "record_files", lambda _, __, state, *___: state == "deleted")
        case "outcomes":
            dies_after(journal, "record_files", lambda _, __, state, *___: state == "deleted")
        case "executed":
            dies_after(journal, "record_event", lambda _, event, *__: event == "executed")
        case _:
            raise ValueError(moment)


def arrange_lost_commit(collector: FileCollector) -> None:
    """Let the process die at the request that commits the rows of a new plan."""
    record_files, client = collector.journal.record_files, collector._client

    def record(*args: Any) -> None:
        dies_before(client, "commit")
        record_files(*args)

    collector.journal.record_files = record


if __name__ == "__main__":
    warehouse_files.last_change_ns = lambda status: status.st_mtime_ns
    ago = timedelta(days=float(sys.argv[2]))
    one = FileCollector.of_lake(Lakehouse(start=False), now=lambda: datetime.now(UTC) - ago)
    one._heartbeats = MemoryHeartbeats()
    arrange_death(one, sys.argv[1])
    one.run()
