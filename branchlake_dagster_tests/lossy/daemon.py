"""A Dagster with its daemon, driven from outside: runs are launched a few at a time, and waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import requests

from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.runs.branch_owner import is_own_reference
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import is_judged, is_opened_by
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.lossy.plan import Planned
from branchlake_dagster_tests.lossy.project import KIND

MODULE = "branchlake_dagster_tests.lossy.project"
_ROOT = Path(__file__).parents[2]
_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}
"""
_CONFIGURATION = """\
telemetry: {{enabled: false}}
nux: {{enabled: false}}
{compute_logs}
run_monitoring: {{enabled: true, poll_interval_seconds: 30}}
sensors: {{use_threads: true, num_workers: 4}}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config: {{max_concurrent_runs: {at_once}, dequeue_interval_seconds: 1}}
"""

Say = Callable[[str], None]


class NotInTime(Exception):  # noqa: N818 - what happened
    """Something was waited for in vain."""


@dataclass
class Daemon:
    """A running `dagster dev` and its instance. `launched` are run ids, in the order of their launch."""

    url: str
    instance: dg.DagsterInstance
    launched: list[str] = field(default_factory=list)

    def launch(self, job: str, tags: Mapping[str, str]) -> str:
        """Put a run of `job` into the queue; its id."""
        selector = {
            "repositoryLocationName": MODULE,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        listed = [{"key": key, "value": value} for key, value in tags.items()]
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": listed}}
        reply = requests.post(
            f"{self.url}/graphql", json={"query": _LAUNCH, "variables": {"params": params}}, timeout=120
        ).json()
        result: dict[str, Any] = reply["data"]["launchRun"]
        assert result["__typename"] == "LaunchRunSuccess", result
        return str(result["run"]["runId"])

    def runs(self) -> list[dg.DagsterRun]:
        """The runs of the plan as they are now, the newest first."""
        found = self.instance.get_runs(dg.RunsFilter(tags={}))
        return [run for run in found if KIND in run.tags and RunTag.CHECKS_FOR not in run.tags]

    def work_through(
        self, planned: Sequence[Planned], *, at_once: int, say: Say, told: Callable[[], str]
    ) -> None:
        """Launch all, `at_once` and a few more under way, and wait until each has ended and has its verdict.

        Raises NotInTime for a run that does not end. A verdict may need a network that is whole: for those
        that are missing two minutes after the last run's end it is not waited any longer.
        """
        waiting = list(planned)
        deadline = time.monotonic() + 600 + 60 * len(waiting)
        since = next_word = time.monotonic()
        while True:
            now = self.runs()
            ended = [run for run in now if run.is_finished]
            untold = [run for run in ended if not settled(run)]
            under_way = len(now) - len(ended)
            if waiting or under_way or not now:
                since = time.monotonic()
            elif not untold or time.monotonic() > since + 120:
                say(f"all ended, {len(untold)} without a verdict; {told()}")
                return
            if time.monotonic() >= next_word:
                next_word = time.monotonic() + 15
                say(f"{len(now)} launched, {len(ended)} ended, {len(untold)} await their verdict; {told()}")
            if time.monotonic() > deadline:
                raise NotInTime(f"{under_way} runs have not ended")
            for _ in range(min(len(waiting), at_once + 2 - under_way)):
                one = waiting.pop(0)
                self.launched.append(self.launch(one.job, one.tags))
            time.sleep(1.0)

    def settle(self, client: NessieClient, say: Say, *, patience_s: float = 180.0) -> None:
        """Let the daemon tell what is untold and the reaper clean up, or until `patience_s` have passed."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(not settled(run) for run in self.runs()):
            time.sleep(1.0)
        for number in range(1, 6):
            left = leftovers(client)
            say(f"before clean-up {number}: {', '.join(left) if left else 'nothing left'}")
            if not left:
                return
            run_id = self.launch("reap_branches", {})
            while not (run := self.instance.get_run_by_id(run_id)) or not run.is_finished:
                if time.monotonic() > deadline + 120:
                    raise NotInTime("the reaper has not ended")
                time.sleep(0.5)


def settled(run: dg.DagsterRun) -> bool:
    """Whether nothing more is to be said of a run: it has a verdict, or it cannot get one.

    One that failed before it opened its branch has none; one that failed and was fenced keeps that word.
    """
    if not run.is_finished:
        return False
    if not is_opened_by(run.tags, run.run_id):
        return not run.is_success
    told = is_judged(run.tags, run_branch_name(run.run_id))
    return told or (not run.is_success and run.tags.get(RunTag.VERDICT) in ("fenced", "continued"))


def leftovers(client: NessieClient) -> list[str]:
    """The references of ours, of whatever kind."""
    return sorted(ref.name for ref in client.references() if is_own_reference(ref.name))


@contextmanager
def daemon(home: Path, environment: Mapping[str, str], *, at_once: int) -> Iterator[Daemon]:
    """Webserver, daemon and code server with a home of their own; all of it ends on leaving."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "dagster.yaml").write_text(_CONFIGURATION.format(compute_logs=COMPUTE_LOGS, at_once=at_once))
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with (
        # First: it makes its databases, and cannot do so in several processes at once.
        dg.DagsterInstance.from_config(str(home)) as instance,
        dagster_dev(MODULE, home=home, environment={**environment, "PYTHONPATH": path}) as url,
    ):
        yield Daemon(url, instance)
