"""Provide the run's Spark session as a Dagster resource, configured through dagster-pyspark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dagster import InitResourceContext
from dagster_pyspark import PySparkResource
from dagster_spark.utils import flatten_dict
from pydantic import PrivateAttr
from pyspark.sql import SparkSession

from branchlake_dagster.internals.dagster import (
    CopiedByFields,
    call_at_step_release,
    call_at_step_start,
    get_running_context,
    is_step_running,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.provenance import find_running_step
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.spark.plan_reads import PlanReads, watch_reads
from branchlake_dagster.spark.session import find_application, is_connect
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import ReadsUnknown

_log = logging.getLogger(__name__)
_SNAPSHOT_PROPERTY = "spark.sql.iceberg.snapshot-property."
"""Iceberg copies settings of a session with this prefix into the summaries of the session's snapshots."""


class BranchSparkResource(CopiedByFields, PySparkResource):
    """dagster-pyspark's session resource, with one session per run that uses the run's branch.

    Reads and writes of `nessie.<namespace>.<table>` with `spark.spark_session.sql(…)` use that branch. The
    session and the branch are created at their first use. A Connect session ends with the run. The base class
    calls `getOrCreate()`, so two runs in one process would share a session and its branch.

    Args:
        lakehouse (LakehouseResource): The lake; the same one that the IO manager has.
        spark_config (Optional[Dict[str, Any]]): dagster-pyspark's Spark settings, nested or dotted,
            including `spark.remote`. (default: none)

    Raises:
        ReadsUnknown: From `spark_session`: a serializable asset requests a classic session, whose reads
            cannot be recorded.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import BranchSparkResource

            @dg.asset
            def revenue(spark: BranchSparkResource):
                return spark.spark_session.sql("SELECT shop, sum(price) FROM nessie.shop.sales GROUP BY shop")
    """

    lakehouse: LakehouseResource
    spark_config: dict[str, Any] = {}  # noqa: RUF012 - a pydantic field, copied per instance

    _holds: tuple[str, str] | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Do nothing. The session and the branch are created at their first use."""

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Release the session. The last user of a run's session ends it on the server.

        Within the code of a step, a resource without a run belongs to a call of `load_asset_value`. Dagster
        ends it before the code gets the frame, so the session stays until the step ends.
        """
        key, self._holds, self._spark_session = self._holds, None, None
        if key is None:
            return
        running_context = get_running_context() if context.run is None else None
        run_id = None if running_context is None else running_context.op_execution_context.run_id
        if run_id is not None and is_step_running(run_id):
            _sessions.release_after_step(key, run_id)
        else:
            _sessions.release(key)

    @property
    def spark_session(self) -> SparkSession:
        """The session of this run. `spark.sql(…)` in it reads and writes the run's branch.

        Reads of a serializable asset are added to the run's read set. A classic session cannot record them,
        so it raises ReadsUnknown for such an asset.
        """
        self.lakehouse.open_branch()  # each step's access is noted, even if the session is open already
        session, reads = self._session_of_step(), self.lakehouse.read_set
        if reads is not None and not is_connect(session):
            if reads.step().is_serializable:
                raise ReadsUnknown(
                    "A serializable asset requests a classic Spark session, whose reads cannot be recorded.",
                    branch=self.lakehouse.open_branch(),
                    hint="Use Spark Connect (session_kind=connect), load its inputs through the IO manager,"
                    " or declare isolation='snapshot'.",
                )
            if reads.is_recording():
                reads.report_scan(PlanReads(unnamed_reads=frozenset({"a classic Spark session"})))
        return session

    def own_session(self) -> SparkSession:
        """Return the run's session for the IO manager, which reports its reads itself.

        Unlike `spark_session`, it raises no error for serializable assets.
        """
        if self._spark_session is None:
            ref = self.lakehouse.open_branch()
            conf = {key: str(value) for key, value in flatten_dict(self.spark_config)}  # type: ignore[no-untyped-call]
            conf = self.lakehouse.session_conf() | conf
            self._holds = (ref, repr(sorted(conf.items())))
            self._spark_session = _sessions.acquire(self._holds, lambda: self._open_session(ref, conf))
        session: SparkSession = self._spark_session
        return session

    def session_of_frames(self) -> SparkSession:
        """Return the run's session for frames that the IO manager loads for the code of a step.

        The code can write to the branch by `frame.sparkSession`, so its snapshots name the step, as those of
        `spark_session`.
        """
        self.lakehouse.open_branch()
        return self._session_of_step()

    def _session_of_step(self) -> SparkSession:
        run_branch = self.lakehouse.run_branch
        if run_branch is not None:
            run_branch.note_use_by_code()
        session = self.own_session()
        step = find_running_step(None if run_branch is None else run_branch.run_id)
        if self._holds is not None:
            if step.key is not None:
                _sessions.name_step(self._holds, step.key, step.attempt)
            application = _sessions.find_application(self._holds) if run_branch is not None else None
            if run_branch is not None and application is not None:
                run_branch.record_application(application, step.key, step.attempt)
        return session

    def _open_session(self, ref: str, conf: Mapping[str, str]) -> SparkSession:
        session = self.lakehouse.lakehouse.spark_session(ref, conf=conf)
        reads = self.lakehouse.read_set
        if reads is not None and is_connect(session):
            watch_reads(session, reads.is_recording, reads.report_scan)
        return session


class _SharedSessions:
    """The sessions of this process by branch and configuration, with the number of their users.

    Dagster gives the asset and the IO manager a separate copy of one resource. With separate sessions, their
    frames could not be joined (SESSION_NOT_SAME).
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that runs while this thread holds the lock may end a resource.
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], tuple[SparkSession, int]] = {}
        self._steps: dict[tuple[str, str], tuple[str, int]] = {}
        self._applications: dict[tuple[str, str], str | None] = {}
        self._releases: dict[str, list[tuple[str, str]]] = {}

    def acquire(self, key: tuple[str, str], create_session: Callable[[], SparkSession]) -> SparkSession:
        with self._lock:
            if key not in self._open:
                self._open[key] = (create_session(), 0)
            session, users = self._open[key]
            self._open[key] = (session, users + 1)
            return session

    def name_step(self, key: tuple[str, str], step: str, attempt: int) -> None:
        """Let the snapshots that user code adds in the session of `key` record the step in their summaries.

        `step` is the key of the running step, and `attempt` its attempt, from 1. If the session is not open,
        nothing happens.
        """
        with self._lock:
            named_step, named_attempt = self._steps.get(key, (None, None))
            if (named_step, named_attempt) == (step, attempt) or key not in self._open:
                return
            session, _ = self._open[key]
            if named_step != step:
                session.conf.set(f"{_SNAPSHOT_PROPERTY}{LakeProperty.CODE_OF_STEP}", step)
            if named_attempt != attempt:
                session.conf.set(f"{_SNAPSHOT_PROPERTY}{LakeProperty.CODE_ATTEMPT}", str(attempt))
            self._steps[key] = (step, attempt)

    def start_attempt(self, branch: str, step: str, attempt: int) -> None:
        """Let the sessions that an earlier attempt of the step has used in this process name this attempt.

        `branch` is the branch of the step's run. The code may have kept such a session, and use it again
        without requesting it. Errors of Spark are logged, because the attempt may not need Spark: the next
        `name_step` of the session raises them.
        """
        with self._lock:
            for key in list(self._steps):  # a finalizer that runs meanwhile may release a session
                named_step, _ = self._steps.get(key, (None, None))
                if key[0] != branch or named_step != step:
                    continue
                try:
                    self.name_step(key, step, attempt)
                except Exception as error:  # noqa: BLE001 - Spark's errors have no common type
                    self._steps.pop(key, None)
                    _log.warning(
                        "A Spark session of branch %s cannot name attempt %d of step %s: %s",
                        branch,
                        attempt,
                        step,
                        error,
                    )

    def find_application(self, key: tuple[str, str]) -> str | None:
        """Return the id of the Spark application in which the session of `key` runs; None if it is unknown.

        Asks Spark once for each session.
        """
        with self._lock:
            if key not in self._applications and key in self._open:
                self._applications[key] = find_application(self._open[key][0])
            return self._applications.get(key)

    def release(self, key: tuple[str, str]) -> None:
        with self._lock:
            session, users = self._open[key]
            self._open[key] = (session, users - 1)
            if users > 1:
                return
            del self._open[key]
            self._steps.pop(key, None)
            self._applications.pop(key, None)
            if is_connect(session):
                session.stop()  # a classic session shares its JVM with the others

    def release_after_step(self, key: tuple[str, str], run_id: str) -> None:
        """Release the session of `key` when the next step of the run in this process ends."""
        with self._lock:
            self._releases.setdefault(run_id, []).append(key)

    def end_step(self, run_id: str) -> None:
        """Release the sessions that are held for steps of the run in this process. Errors are logged."""
        with self._lock:
            keys = self._releases.pop(run_id, [])
        for key in keys:
            try:
                self.release(key)
            except Exception as error:  # noqa: BLE001 - the others must be released too
                _log.warning("A Spark session of run %s could not be closed: %s", run_id, error)


_sessions = _SharedSessions()


def _name_repeated_step(run_id: str) -> None:
    step = find_running_step(run_id)
    if step.key is not None and step.attempt > 1:
        _sessions.start_attempt(run_branch_name(run_id), step.key, step.attempt)


call_at_step_start(_name_repeated_step)
call_at_step_release(_sessions.end_step)
