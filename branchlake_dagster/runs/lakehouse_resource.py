"""Provides the lake and the run's branch as a Dagster resource."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from dagster import DagsterInstance, DagsterRun, InitResourceContext, MetadataValue
from pyarrow import ArrowException
from pydantic import PrivateAttr

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.catalog.options import COMMIT_PROPERTY, NAMESPACE_CREATE
from branchlake_dagster.errors import ConfigurationError, ReadOnlyReference
from branchlake_dagster.internals.dagster import (
    call_at_step_end,
    call_at_step_release,
    call_at_step_start,
    find_context_of_run,
    find_job_resources,
    get_running_context,
    is_step_running,
    report_engine_event,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.branch_owner import find_check_reference, is_retry, load_instance_id
from branchlake_dagster.runs.discarding import clear_inherited_status
from branchlake_dagster.runs.heartbeats import HeartbeatStore, SharedHeartbeats, build_heartbeat
from branchlake_dagster.runs.lake_config import LakeConfig
from branchlake_dagster.runs.leases import RunLeases
from branchlake_dagster.runs.provenance import ReadSet, ReportedReads, find_running_step
from branchlake_dagster.runs.retries import (
    EarlierSteps,
    inherit_parent_branch,
    load_earlier_steps,
    undo_earlier_attempts,
)
from branchlake_dagster.runs.run_branch import RunBranch, run_branch_name
from branchlake_dagster.runs.run_tags import Retention, RunLocation, is_opened_by
from branchlake_dagster.runs.session_uses import BranchTimeline, load_timeline
from branchlake_dagster.stored_names import EventMetadata, LakeProperty, RunTag
from branchlake_dagster.tables.errors import OneLakeOnly, RetryNeedsFullRun
from branchlake_dagster.tables.specification import find_table_name, parse_exclusive_name
from branchlake_dagster.tables.table_files import TableFiles


class ExclusiveNames:
    """The names of the exclusive leases that a run's assets declare.

    They come from the job's definition, which is known only while a step of the run `run_id` runs in this
    process. So the names are read in the first step and kept.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._names: frozenset[str] | None = None

    def __call__(self) -> frozenset[str]:
        """Return the names; empty if no step runs in this process and none has called this before."""
        if self._names is None:
            context = get_running_context() or find_context_of_run(self._run_id)
            if context is None:
                return frozenset()
            job = context.op_execution_context.get_step_execution_context().job_def
            names = (
                parse_exclusive_name(spec.metadata, spec.key.to_user_string())
                for asset in job.asset_layer.data
                for spec in asset.assets_def.specs
            )
            self._names = frozenset(name for name in names if name)
        return self._names


_log = logging.getLogger(__name__)
_heartbeats = SharedHeartbeats()
_first_use = threading.RLock()
"""Guards the registries below. Reentrant: a finalizer may end a resource while its thread holds the lock."""
_branches: WeakValueDictionary[tuple[int, str, str], RunBranch] = WeakValueDictionary()
"""The branches by process, run and lake id. All resources of a lake in one run share a branch."""
_resources: WeakValueDictionary[tuple[int, str, str], LakehouseResource] = WeakValueDictionary()
"""The newest resource of each branch, by the same keys."""
_reported_reads: WeakKeyDictionary[RunBranch, ReportedReads] = WeakKeyDictionary()
"""The reads that are in the log of a branch's run. All resources of a lake in one run share them."""


class _StepHolds:
    """What resources that the code of a step builds leave to the end of the step.

    These resources end before the step does, but the code may still hold their catalogs and frames. So the
    run's branch stays recorded as used, and its heartbeat continues.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that runs while this thread holds the lock may end or use a resource.
        self._lock = threading.RLock()
        self._branches: dict[tuple[int, str], set[RunBranch]] = {}
        self._releases: dict[tuple[int, str], list[Callable[[], None]]] = {}

    def hold_branch(self, run_id: str, branch: RunBranch) -> None:
        with self._lock:
            self._branches.setdefault((os.getpid(), run_id), set()).add(branch)

    def release_later(self, run_id: str, release: Callable[[], None]) -> None:
        """Call `release` when the step of the run in this process ends."""
        with self._lock:
            self._releases.setdefault((os.getpid(), run_id), []).append(release)

    def end_step(self, run_id: str) -> None:
        """Release the branches and heartbeats that are held for steps of the run in this process.

        Errors are logged.
        """
        key = (os.getpid(), run_id)
        with self._lock:
            self._branches.pop(key, None)
            releases = self._releases.pop(key, [])
        for release in releases:
            try:
                release()
            except Exception as error:  # noqa: BLE001 - the others must be released too
                _log.warning("A heartbeat of run %s could not be ended: %s", run_id, error)


_step_holds = _StepHolds()


class LakehouseResource(LakeConfig):
    """The lake, and inside a run the run's branch of it.

    The branch is created when the run first calls `open_branch()` or requests a catalog or a session. A run
    that never does has no branch. Outside a run (a sensor, a notebook), the resource uses `main`.

    Args:
        **fields (Any): The fields of `Settings`, each a value or a `dg.EnvVar`. (default: the environment's
            `BRANCHLAKE_…`)

    Raises:
        RunBranchGone: From `open_branch()` and its callers: the run was fenced and its branch is gone.
        InvalidCheckRun: At the start of a run whose tags make it a check run of an invalid state.
        LeaseHeld: From `open_branch()` of a run that writes an exclusive asset: another run holds the lease
            for longer than this run waits.
        LeaseLost: From `open_branch()`: another run has taken over the lease, because this run was silent.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import LakehouseResource

            @dg.asset
            def price_count(lakehouse: LakehouseResource) -> dg.MaterializeResult:
                table = lakehouse.catalog().load_table(("shop", "prices"))  # on the run's branch
                return dg.MaterializeResult(metadata={"rows": table.scan().count()})

            lake = LakehouseResource(nessie_uri=dg.EnvVar("NESSIE"), warehouse="s3://lake/tables")
            defs = dg.Definitions(assets=[price_count], resources={"lakehouse": lake})
    """

    _lakehouse: Lakehouse | None = PrivateAttr(default=None)
    _run_branch: RunBranch | None = PrivateAttr(default=None)
    _reads: ReadSet | None = PrivateAttr(default=None)
    _pinned: str | None = PrivateAttr(default=None)
    _heartbeat: tuple[str, str] | None = PrivateAttr(default=None)
    _run_id: str | None = PrivateAttr(default=None)
    _step_run_id: str | None = PrivateAttr(default=None)
    _has_ended: bool = PrivateAttr(default=False)
    _instance: str | None = PrivateAttr(default=None)
    _ended: Callable[[], bool] | None = PrivateAttr(default=None)
    _retries_parent: bool = PrivateAttr(default=False)
    _load_earlier: Callable[..., EarlierSteps] | None = PrivateAttr(default=None)
    _load_timeline: Callable[[str], BranchTimeline] | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Bind the resource to the run.

        Uses neither Nessie nor Spark: a run that uses no table gets no branch.

        A retry is different: it takes over its parent's work now, because its remaining steps may use no
        table.

        `load_asset_value` and `build_resources` create resources without a run. In the code of a step, these
        resources use the branch of the step's run, so that they see what the run has written. A resource of
        another lake than the run's uses `main`.
        """
        run, instance = context.run, context.instance
        belongs_to_run = run is not None
        if run is None and (running_context := get_running_context()) is not None:
            step_context = running_context.op_execution_context
            # A thread that outlives its step still has the step's context, and so has a forked process.
            if is_step_running(step_context.run_id) and self._is_lake_of_step(
                step_context.get_step_execution_context()
            ):
                run, instance = step_context.run, step_context.instance
        self._has_ended, self._step_run_id, self._run_id = False, None, None
        if run is None or instance is None:
            return
        key = (os.getpid(), run.run_id, self.lakehouse.settings.lake_id)
        shared_branch = _branches.get(key)
        if shared_branch is None and instance.get_run_by_id(run.run_id) is None:
            return
        self._run_id = run.run_id
        self._instance = load_instance_id(instance)
        self._load_earlier = partial(load_earlier_steps, instance)
        self._load_timeline = partial(load_timeline, instance)
        self._ended = lambda: (
            (current_run := instance.get_run_by_id(run.run_id)) is None or current_run.is_finished
        )
        if not belongs_to_run:
            self._step_run_id = run.run_id
        # Heartbeats start with the process. Otherwise a death before the first access would not be noticed.
        self._start_heartbeat(run_branch_name(run.run_id), run.run_id)
        if reference := find_check_reference(run.run_id, run.tags):
            # A check run sends heartbeats for its own branch name, although that branch never exists.
            # Publications wait for the run, so its death must be noticed.
            self._pinned = reference
            return
        with _first_use:
            run_branch = shared_branch or self._build_run_branch(run, instance, context.log)
            self._run_branch = _branches.setdefault(key, run_branch)
            if belongs_to_run:  # the others end before the run does
                _resources[key] = self
            else:
                _step_holds.hold_branch(run.run_id, self._run_branch)
            reported = _reported_reads.setdefault(self._run_branch, ReportedReads())
        self._reads = ReadSet.from_run(
            instance, run, lambda: self.lakehouse.nessie, self.open_branch, reported
        )
        self._retries_parent = is_retry(instance, run)
        if self._retries_parent:
            try:
                if self._run_branch.take_over():
                    self.open_branch()
            except (RetryNeedsFullRun, OneLakeOnly):  # raised again by a step that needs a table of this lake
                clear_inherited_status(instance, run.run_id)

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002 - Dagster's signature
        """Record the branch's head in the run's log: the publisher refuses a head that is not recorded.

        Also stop the heartbeat of the branch, if no other resource of this process uses the branch.

        Both happen at the end of the step for a resource that the code of a step builds: with a catalog or a
        frame of this resource, the code may still write.
        """
        self._has_ended = True
        if self._step_run_id is not None:
            return
        heartbeat, self._heartbeat = self._heartbeat, None
        try:
            if self._run_branch is not None:
                self._run_branch.record_head()
        finally:
            if heartbeat is not None:
                _heartbeats.release(heartbeat, self._ended)

    def _is_lake_of_step(self, step_context: Any) -> bool:
        """Return whether this is the lake of the run of a running step.

        The lake of the run's branch counts. Without a branch, the lake of the run's resources in this process
        counts, or else the lake that the job declares. If there are several, it is not known: returns False.
        """
        lake, run_id = self.lakehouse.settings.lake_id, step_context.run_id
        run = step_context.instance.get_run_by_id(run_id)
        if run is not None and is_opened_by(run.tags, run_id) and RunTag.LAKE in run.tags:
            return bool(run.tags[RunTag.LAKE] == lake)
        with _first_use:
            lakes = {
                lake_id
                for process, owner, lake_id in list(_resources)
                if process == os.getpid() and owner == run_id
            }
        return {lake} == (lakes or _find_declared_lakes(step_context))

    def _build_run_branch(
        self, run: DagsterRun, instance: DagsterInstance, log: logging.Logger | None
    ) -> RunBranch:
        run_id, lake = run.run_id, self.lakehouse.settings.lake_id
        retention_tags = Retention.from_settings(self.lakehouse.settings).to_tags()

        def load_tags() -> Mapping[str, str]:
            current_run = instance.get_run_by_id(run_id)
            run_tags = current_run.tags if current_run else {}
            if is_opened_by(run_tags, run_id) and run_tags.get(RunTag.LAKE, lake) != lake:
                raise OneLakeOnly(
                    "The run already works on another lake, but a run can be published to one lake only.",
                    run_id=run_id,
                    branch=run_tags[RunTag.BRANCH],
                    hint="Materialize the assets of the two lakes in separate runs.",
                )
            return run_tags

        def add_tags(new_tags: Mapping[str, str]) -> None:
            instance.add_run_tags(run_id, {**new_tags, **retention_tags, RunTag.LAKE: lake})

        def report_head(branch: str, hash_: str) -> None:
            metadata = {EventMetadata.BRANCH_HEAD: MetadataValue.text(hash_)}
            step_key = find_running_step(run_id).key
            message = f"Branch {branch} is at {hash_[:16]}."
            report_engine_event(instance, message, run, metadata, step_key=step_key)

        def report_application(branch: str, application: str, step_key: str | None) -> None:
            metadata = {EventMetadata.SPARK_APPLICATION: MetadataValue.text(application)}
            message = f"The step's code uses Spark application {application} on branch {branch}."
            report_engine_event(instance, message, run, metadata, step_key=step_key)

        settings = self.lakehouse.settings
        leases = RunLeases(
            lambda: self.lakehouse.nessie,
            instance,
            run_id,
            ExclusiveNames(run_id),
            lambda: HeartbeatStore.from_settings(settings).all(),
            interval_s=settings.heartbeat_interval_s,
            wait_s=settings.exclusive_wait_s,
            log_info=(log or _log).info,
        )
        return RunBranch(
            lambda: self.lakehouse.nessie,
            run_id,
            load_tags=load_tags,
            add_tags=add_tags,
            inherit_location=lambda: inherit_parent_branch(self.lakehouse.nessie, instance, run),
            direct_main=self.lakehouse.settings.when_unavailable == "direct_main",
            warn=(log or _log).warning,
            hold_leases=leases.ensure_held,
            report_head=report_head,
            report_application=report_application,
        )

    @property
    def lakehouse(self) -> Lakehouse:
        """The lake with its connections, which this process creates at the first use."""
        if self._lakehouse is None:
            self._lakehouse = Lakehouse(self.effective())
        return self._lakehouse

    @property
    def run_branch(self) -> RunBranch | None:
        """The branch of the current run; None outside a run and in a run that repeats checks."""
        return self._run_branch

    @property
    def read_set(self) -> ReadSet | None:
        """The record of the run's reads; None outside a run and in a run that repeats checks."""
        return self._reads

    def open_branch(self) -> str:
        """Open the run's branch, which is created if needed. Return the reference for reads and writes.

        The reference is the run's branch, or `main` outside a run. In a run that repeats checks for the
        publisher, it is `name@hash`, which is read-only. Raises ConfigurationError if the resource belongs to
        a run that is over.
        """
        self._require_own_run()
        if self._run_branch is None:
            return self._pinned or MAIN
        location = self._run_branch.open()
        if not location.unbranched:
            self._start_heartbeat(location.branch, self._run_branch.run_id)
            self._undo_earlier_attempts(self._run_branch, location)
        return location.branch

    def _require_own_run(self) -> None:
        """Raise ConfigurationError if the resource was kept until its run was over, for example in a module.

        Asks Dagster's storage, but only in a step of another run, and after the resource has ended. A run may
        be executed in a step of another one, and its resources are set up and its hooks are called there.
        """
        if self._run_id is None or is_step_running(self._run_id):
            return
        context = get_running_context()
        is_own_context = context is None or context.op_execution_context.run_id == self._run_id
        if is_own_context and not self._has_ended:
            return
        if self._ended is not None and self._ended():
            raise ConfigurationError(
                "This lake resource belongs to a run that is over, whose branch it would read and write.",
                run_id=self._run_id,
                branch=self._pinned or run_branch_name(self._run_id),
                hint="Do not keep a resource for longer than its step: request it in each asset, or call"
                " build_resources again.",
            )

    def _undo_earlier_attempts(self, branch: RunBranch, location: RunLocation) -> None:
        """Remove the rows that the code of earlier attempts of the running step wrote.

        This happens once for each attempt, and only if the step was attempted before.
        """
        step = find_running_step(branch.run_id)
        key = step.key
        if key is None or not (step.attempt > 1 or self._retries_parent):
            return

        def undo() -> None:
            namespace = self.lakehouse.settings.default_namespace
            earlier = EarlierSteps(frozenset({key}))
            if self._retries_parent and self._load_earlier is not None:
                earlier = self._load_earlier(location.branch, key, step.assets, step.other_assets)
            tables = undo_earlier_attempts(
                self.lakehouse.nessie,
                location.branch,
                location.base_hash,
                key,
                TableFiles(self.lakehouse.settings.file_io_properties()).metadata,
                {**self.maker_properties(), LakeProperty.CODE_OF_STEP: key},
                {name for asset in earlier.finished_assets if (name := find_table_name(asset, namespace))},
                earlier.keys,
                load_timeline=partial(self._load_timeline, location.branch) if self._load_timeline else None,
            )
            if tables:
                names = ", ".join(tables)
                _log.warning("Removed the rows that an earlier attempt of step %s wrote to %s.", key, names)

        branch.run_at_first_access(key, step.attempt, undo)

    def start_step(self) -> None:
        """Remove what the code of earlier attempts of the running step wrote, if the run has a branch.

        So nothing of it is left if this attempt does not use the lake. Cost: none in the first attempt of a
        step, unless the run is a retry. Otherwise as for `undo_earlier_attempts`.
        """
        branch = self._run_branch
        if branch is None or not (self._retries_parent or find_running_step(branch.run_id).attempt > 1):
            return
        try:
            has_branch = branch.take_over()
        except (RetryNeedsFullRun, OneLakeOnly):
            return  # raised again by a step that needs a table of this lake
        if has_branch:
            self.open_branch()

    def require_writable(self) -> None:
        """Raise ReadOnlyReference in a run that repeats checks for the publisher."""
        if self._pinned is not None:
            raise ReadOnlyReference(
                "The run repeats checks for the publisher, so it may not write.",
                branch=self._pinned,
                hint="Materialize the asset in a separate run.",
            )

    def _start_heartbeat(self, branch: str, run_id: str) -> None:
        with _first_use:
            if self._heartbeat is None and not self._has_ended:
                settings = self.lakehouse.settings
                heartbeat = build_heartbeat(
                    branch,
                    run_id=run_id,
                    interval_s=settings.heartbeat_interval_s,
                    instance=self._instance or "",
                )
                try:
                    store = HeartbeatStore.from_settings(settings)
                except (OSError, ValueError, ArrowException) as error:
                    # Without heartbeats the reaper judges the run by its age. That must not fail the run.
                    _log.warning("Heartbeats for branch %s cannot be sent: %s", branch, error)
                    return
                self._heartbeat = _heartbeats.acquire(store, heartbeat)
                if self._step_run_id is not None:
                    release = partial(_heartbeats.release, self._heartbeat, self._ended)
                    _step_holds.release_later(self._step_run_id, release)

    def catalog(self) -> NessieCatalog:
        """Return PyIceberg's catalog at the reference of `open_branch()`.

        Tables that a serializable asset loads through it are added to the run's read set.
        """
        on_load = self._reads.report_load if self._reads else None
        ref, properties, step = self.open_branch(), self._commit_options(), None
        if self._run_branch is not None:
            self._run_branch.note_use_by_code()
            step = find_running_step(self._run_branch.run_id).key
        if step is not None:
            properties[f"{COMMIT_PROPERTY}{LakeProperty.CODE_OF_STEP}"] = step
        return self.lakehouse.catalog(ref, on_load=on_load, properties=properties)

    def base_catalog(self) -> NessieCatalog:
        """Return PyIceberg's read-only catalog at the commit from which the run's branch started.

        A repeated step finds its table there as it was before its first attempt. Outside a run, and in a run
        without a branch, the tables are those of `catalog()`.
        """
        ref = self.open_branch()
        location = self._run_branch.open() if self._run_branch is not None else None
        if location is not None and location.base_hash and not location.unbranched:
            ref = f"{location.branch}@{location.base_hash}"
        return self.lakehouse.catalog(ref, on_load=self._reads.report_load if self._reads else None)

    def own_catalog(self) -> NessieCatalog:
        """Return the catalog for the IO manager, which reports its reads itself (`provenance.report_read`).

        Its commits create missing namespaces.
        """
        properties = {**self._commit_options(), NAMESPACE_CREATE: "true"}
        return self.lakehouse.catalog(self.open_branch(), properties=properties)

    def _commit_options(self) -> dict[str, str]:
        return {f"{COMMIT_PROPERTY}{name}": value for name, value in self.maker_properties().items()}

    def session_conf(self) -> dict[str, str]:
        """Return the configuration of this run's Spark sessions, in addition to the branch.

        Spark's Nessie client does not add these properties to its commits, so the snapshots record the run.
        """
        return {
            f"spark.sql.iceberg.snapshot-property.{name}": value
            for name, value in self.maker_properties().items()
        }

    def maker_properties(self) -> dict[str, str]:
        """Return the commit properties that name the Dagster instance and the run; empty outside a run.

        The publisher recognizes the run's own commits on its branch by these properties.
        """
        if not self._instance or self._run_branch is None:
            return {LakeProperty.INSTANCE: self._instance} if self._instance else {}
        return {LakeProperty.INSTANCE: self._instance, LakeProperty.RUN_ID: self._run_branch.run_id}


def _find_declared_lakes(step_context: Any) -> set[str]:
    """Return the ids of the lakes that the job of a step declares as resources."""
    lakes = set()
    for resource in find_job_resources(step_context):
        if isinstance(resource, LakeConfig):
            # The variable of a `dg.EnvVar` may have an invalid value.
            with contextlib.suppress(ValueError):
                lakes.add(resource.effective().lake_id)
    return lakes


def record_branch_heads(run_id: str) -> None:
    """Record the heads of the branches that this run opened in this process; see `RunBranch.record_head`.

    Called at the end of each step, before Dagster reports the end. So the gate knows which commits precede a
    later step, whatever the executor, and a branch that is reset during a later step is noticed.
    """
    with _first_use:
        branches = list(_branches.items())
    for (process, owner, _), branch in branches:
        if process == os.getpid() and owner == run_id:
            branch.record_head()


def undo_repeated_steps(run_id: str) -> None:
    """Remove what earlier attempts of the running step wrote to the lakes of a run.

    See `LakehouseResource.start_step`.
    """
    with _first_use:
        resources = list(_resources.items())
    for (process, owner, _), resource in resources:
        if process == os.getpid() and owner == run_id:
            resource.start_step()


call_at_step_start(undo_repeated_steps)
call_at_step_end(record_branch_heads)
call_at_step_release(_step_holds.end_step)
