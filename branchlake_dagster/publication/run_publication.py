"""Judge and publish one run: as its last step, or by a call, instead of waiting for the publication sensor.

`branchlake_definitions(settings, definitions)` wraps the executor of the code location with `publish_at_end`.
A job with its own executor wraps it itself:

    dg.define_asset_job("prices_job", selection, executor_def=publish_at_end(dg.multiprocess_executor))

The run uses the publisher of the sensor. If the process dies, or Nessie does not answer, the sensor finds the
branch and continues from any state. `publish` does the same for a finished run, in the caller's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread
from typing import Any

import click
import dagster as dg
from dagster import DagsterEvent, Executor

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.internals.dagster import asset_graph_of, build_engine_event
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.assessment import NO_TABLE_CHANGED, AssessedRun
from branchlake_dagster.publication.ledger import Candidate, Result
from branchlake_dagster.publication.outcome import CheckRun, EndedRun, Outcome
from branchlake_dagster.publication.parked_runs import format_error
from branchlake_dagster.publication.reconciler import (
    BranchPublisher,
    Reconciler,
    Reservations,
    acquire_pass_lock,
    longest_pass_s,
    waiting_outcome,
)
from branchlake_dagster.runs.discarding import (
    FAILING_STATUSES,
    clear_inherited_status,
    format_failure,
    report_branch_end,
)
from branchlake_dagster.runs.heartbeats import HeartbeatStore, send_heartbeats
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    FENCED,
    NO_VALUE,
    PENDING,
    RunLocation,
    RunState,
    find_publication,
    find_recorded_base,
    find_run_location,
    is_judged,
    is_opened_by,
)
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import RunBranchGone

_UNPUBLISHED_STATES = (RunState.BLOCKED, RunState.REFUSED, RunState.UNBRANCHED, RunState.UNDONE)
"""Recorded states that `publish()` returns as they are for a judged run without a publication. For any other
recorded state it returns DISCARDED."""


_MAX_PASSES = 20
"""The most passes of one `publish()` call. After a pass that requests checks, the call runs these checks."""


class RunUnknown(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The Dagster instance has no run of this id, so nothing can be judged."""


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of one run: whether `main` has it, and if not, why.

    Attributes:
        run_id (str): The run.
        status (str): `published`; `blocked` by the gate; `refused` because its changes conflict with newer
            changes of `main`; `discarded` because it failed or changed no table; `undone` if its
            publication was undone later; `waiting`, `checking` or `try again` if there is no decision yet;
            `unbranched` if it wrote to `main` directly; `set aside` if judging it failed again and again.
        reasons (tuple[str, ...]): Why it is not published, one sentence each; empty if it is published.
        warnings (tuple[str, ...]): Failed checks that do not block.
        commit (str | None): The commit on `main` that holds its changes.
        tables (tuple[str, ...]): The dotted names of the tables that this call published.

    Examples:
        .. code-block:: python

            outcome = publish(result, defs, instance=instance)
            assert outcome.published, outcome
            assert outcome.commit
    """

    run_id: str
    status: str
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    commit: str | None = None
    tables: tuple[str, ...] = ()

    @property
    def published(self) -> bool:
        """Whether the run is published on `main`."""
        return self.status == RunState.PUBLISHED

    def __str__(self) -> str:
        details = "; ".join(self.reasons or self.warnings)
        return f"run {self.run_id}: {self.status}" + (f": {details}" if details else "")


def publish(
    run: str | dg.ExecuteInProcessResult | dg.DagsterRun,
    definitions: dg.Definitions,
    *,
    instance: dg.DagsterInstance | None = None,
    lakehouse: Lakehouse | LakehouseResource | None = None,
) -> RunOutcome:
    """Judges one finished run and publishes it if it passes, in the caller's process.

    The function does for tests, scripts and notebooks what the publication sensor does for a run: the same
    gate, commit, tags and observations. The branch of a judged run is deleted, unless the settings keep it
    for debugging. Sensors may work at the same time. If `main` has changed, some checks of whole tables must
    run again; they run in this process. A judged run is not judged again: the function returns the recorded
    outcome, with the reasons as its tags hold them (at most 250 characters).

    Args:
        run (str | ExecuteInProcessResult | DagsterRun): The run, its id, or the result of
            `execute_in_process` or `materialize`.
        definitions (Definitions): The assets and all of their checks. The gate blocks a run that left out a
            check.
        instance (Optional[DagsterInstance]): The instance that has the run. (default: the one of
            `DAGSTER_HOME`)
        lakehouse (Optional[Lakehouse | LakehouseResource]): The lake. (default: the `LakehouseResource`
            of the run's lake among the resources of `definitions`)

    Returns:
        RunOutcome: The status, the reasons if the run is not published, and the commit if it is. A blocked
        or refused run is returned as an outcome, not raised as an error.

    Raises:
        RunUnknown: The instance does not have this run. A run of `dg.materialize(…)` without an `instance`
            is forgotten when it ends.
        ConfigurationError: The definitions have no `LakehouseResource` and `lakehouse` is None; or the run
            wrote to another lake; or several resources have different settings for its lake.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import publish

            result = defs.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
            outcome = publish(result, defs, instance=instance)
            assert outcome.published, outcome.reasons
    """
    instance = instance or dg.DagsterInstance.get()
    run_id = run if isinstance(run, str) else run.run_id
    dagster_run = instance.get_run_by_id(run_id)
    if dagster_run is None:
        raise RunUnknown(
            "The Dagster instance does not have this run.",
            run_id=run_id,
            hint="Pass the instance of the run: execute_in_process(instance=instance) or"
            " materialize(…, instance=instance), then publish(…, instance=instance).",
        )
    if not dagster_run.is_finished:
        return RunOutcome(run_id, RunState.WAITING, (f"the run is {dagster_run.status.value.lower()}",))
    run_location = find_run_location(dagster_run.tags, run_id)
    if run_location is None:
        reason = (
            NO_TABLE_CHANGED
            if dagster_run.is_success
            else f"the run ended as {dagster_run.status.value.lower()}"
        )
        return RunOutcome(run_id, RunState.DISCARDED, (reason,))
    lake = _find_lake(definitions, lakehouse, dagster_run)
    reconciler = Reconciler.from_lake(lake, instance, definitions.resolve_asset_graph())
    outcome: Outcome | None = None
    for _ in range(_MAX_PASSES):
        outcome = reconciler.reconcile_run(run_id_of_branch(run_location.branch))
        if outcome is None or outcome.check_run is None:
            break
        _run_checks(definitions, instance, outcome.check_run)
    if outcome is None or (outcome.publication is not None and outcome.verdict is None):
        return _recorded_outcome(instance.get_run_by_id(run_id) or dagster_run, run_location)
    return _to_run_outcome(run_id, outcome)


def _find_lake(
    definitions: dg.Definitions, lakehouse: Lakehouse | LakehouseResource | None, run: dg.DagsterRun
) -> Lakehouse:
    """Return the lake that the run wrote to: `lakehouse`, or the resource of that lake in the definitions.

    Raises ConfigurationError if that is another lake, or if resources have different settings for it.
    """
    resources = [lakehouse] if lakehouse is not None else (definitions.resources or {}).values()
    lakes = [
        (resource, resource.effective() if isinstance(resource, LakehouseResource) else resource.settings)
        for resource in resources
        if isinstance(resource, Lakehouse | LakehouseResource)
    ]
    if not lakes:
        raise ConfigurationError(
            "The definitions have no LakehouseResource among their resources, so the lake is unknown.",
            hint="Merge branchlake_definitions() into the definitions, or call publish(…, lakehouse=…).",
            reason="lake_unknown",
        )
    lake_id = run.tags.get(RunTag.LAKE)
    own_lakes = [(lake, settings) for lake, settings in lakes if lake_id in (None, settings.lake_id)]
    if not own_lakes:
        raise ConfigurationError(
            "The run wrote to another lake than "
            + ("those of the definitions." if lakehouse is None else "the one given as `lakehouse`."),
            run_id=run.run_id,
            hint="Pass its lake, with the run's Nessie and warehouse: publish(…, lakehouse=…).",
            reason="lake_differs",
        )
    if any(settings.model_dump() != own_lakes[0][1].model_dump() for _, settings in own_lakes):
        raise ConfigurationError(
            f"The definitions have {len(own_lakes)} lakes with different settings that may be the run's.",
            run_id=run.run_id,
            hint="Pass the one whose settings judge the run: publish(…, lakehouse=…).",
            reason="lake_ambiguous",
        )
    lake, _ = own_lakes[0]
    return lake.lakehouse if isinstance(lake, LakehouseResource) else lake


def _run_checks(definitions: dg.Definitions, instance: dg.DagsterInstance, check_run: CheckRun) -> None:
    """Run the checks that `check_run` lists, as one run in this process that reads the rebased state.

    A failed check raises no error: its result is in the log of that run. `definitions` have the checks.
    """
    request = check_run.to_run_request()
    job = definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection=set(), asset_check_selection=set(request.asset_check_keys or [])
    )
    job.execute_in_process(instance=instance, tags=dict(request.tags), raise_on_error=False)


def _to_run_outcome(run_id: str, outcome: Outcome) -> RunOutcome:
    reasons = () if outcome.state is RunState.PUBLISHED else outcome.reasons
    warnings = outcome.verdict.warnings if outcome.verdict is not None else ()
    return RunOutcome(run_id, outcome.state, reasons, warnings, outcome.publication, outcome.tables)


def _recorded_outcome(run: dg.DagsterRun, run_location: RunLocation) -> RunOutcome:
    """Return the outcome of a run whose branch does not exist any more, from its tags."""
    commit = find_publication(run.tags, run_location.branch)
    if commit and run.tags.get(RunTag.STATUS) != RunState.UNDONE:
        return RunOutcome(run.run_id, RunState.PUBLISHED, commit=commit)
    reason, verdict = run.tags.get(RunTag.REASON, NO_VALUE), run.tags.get(RunTag.VERDICT, PENDING)
    reasons = () if reason == NO_VALUE else (reason,)
    if run_location.unbranched and verdict == PENDING:
        explanation = "the run wrote to main directly; the publication sensor judges it"
        return RunOutcome(run.run_id, RunState.UNBRANCHED, (explanation,))
    if verdict == PENDING and run.is_success:
        return RunOutcome(run.run_id, RunState.REFUSED, ("its branch was deleted before the run was judged",))
    status = run.tags.get(RunTag.STATUS)
    state = RunState(status) if status in _UNPUBLISHED_STATES else RunState.DISCARDED
    return RunOutcome(run.run_id, state, reasons)


# -- as the last step of the run --------------------------------------------------------------------------

LEFT_TO_SENSOR = "Left to the publication sensor"
"""The first words of the event message by which a run reports that it could not publish itself."""
_SEE_STATUS = "See: branchlake status"
_PATIENCE_S = 2.0
"""Seconds to wait for other runs that publish themselves at the moment, each within some tenths of a second.

A run that is left to the sensor is judged twice and waits for the next tick. With a wait of 0.25 s, a third
of a backfill was left to the sensor (fifty runs, ten at a time).
"""


class NotPublished(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A run was blocked or refused at its end; `main` is as it was.

    The run fails with this error after its steps have succeeded. The text has the reasons and what to do
    next: how to see the rows that failed a check, or to launch the run again. The pages of the assets show
    the same.

    Examples:
        .. code-block:: python

            @dg.run_failure_sensor
            def alert(context: dg.RunFailureSensorContext):
                if context.dagster_run.tags.get("branchlake") in ("blocked", "refused"):
                    context.log.error(context.failure_event.message)
    """


def publish_at_end(
    inner: dg.ExecutorDefinition = dg.in_process_executor, *, lakehouse_key: str = "lakehouse"
) -> dg.ExecutorDefinition:
    """An executor that judges the run at its end, and publishes it if all its steps have succeeded.

    A blocked or refused run fails, so that it is visible. The publication sensor handles the other cases:
    checks must run again on a rebased table, Nessie does not answer, or another publisher is running.
    `branchlake_definitions(settings, definitions)` wraps the executor of `definitions`. Jobs with their own
    executor must wrap it themselves.

    Args:
        inner (ExecutorDefinition): The executor that runs the steps. (default: `in_process_executor`)
        lakehouse_key (str): The resource key of the lake, as in `branchlake_definitions`. (default:
            `lakehouse`)

    Returns:
        ExecutorDefinition: Its name is that of `inner` plus `_publishing`.

    Raises:
        NotPublished: Within the run, if it was blocked or refused.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import publish_at_end

            prices_job = dg.define_asset_job(
                "prices_job", selection="shop/prices", executor_def=publish_at_end(dg.in_process_executor)
            )
    """

    def create(context: Any) -> Executor:
        inner_executor: Executor = inner.executor_creation_fn(context)  # type: ignore[misc]
        return _PublishingExecutor(inner_executor, lakehouse_key)

    return dg.ExecutorDefinition(
        name=f"{inner.name}_publishing",
        config_schema=inner.config_schema.as_field(),
        requirements=inner.get_requirements,
        executor_creation_fn=create,
        description=f"{inner.name}, then publication of the run's branch.",
    )


def format_run_outcome(outcome: Outcome) -> str:
    """Format the outcome of a run as one line, with the command that shows more."""
    subject, reasons = f"Run {outcome.run_id}", " ".join("; ".join(outcome.reasons).split()).rstrip(".")
    if outcome.state is RunState.PUBLISHED:
        return f"{subject} is published as {(outcome.publication or '')[:16]}. {_SEE_STATUS}"
    if outcome.state in (RunState.BLOCKED, RunState.REFUSED):
        return f"{subject} is {outcome.state}: {reasons}. {outcome.next_step or _SEE_STATUS}"
    if outcome.state is RunState.DISCARDED:
        return f"{subject} has nothing to publish: {reasons}."
    return f"{subject} waits for the publication sensor of dagster-daemon or dg dev: {reasons}. {_SEE_STATUS}"


def _print_on_command_line(message: str) -> None:
    """Print the line if a person materializes assets with Dagster's command. Run workers print nothing."""
    command = click.get_current_context(silent=True)
    if command is not None and command.info_name == "materialize":
        click.echo(message, err=True)


_UNDECIDED = (
    RunState.TRY_AGAIN,
    RunState.WAITING,
    RunState.CHECKING,
    RunState.KEPT,
    RunState.PARKED,
)


class RunPublication(BranchPublisher):
    """Judges and publishes a run from inside it, as its last step.

    The run must have opened a branch, and all its steps must have succeeded. It is judged like an ended run,
    although Dagster does not show it as finished yet.
    """

    def publish(self, run: dg.DagsterRun) -> Outcome:
        """Judge the run, publish it if it passes, and return the outcome."""
        return self._end_run(
            run, lambda ended_run, reservations: next(self._process_batch([ended_run], reservations, map))
        )

    def judge(self, run: dg.DagsterRun) -> Outcome:
        """Judge the run, and leave its publication to the sensor if it passes.

        A state that an earlier pass prepared may still be published: if the checks on that state are
        complete and have passed, this call publishes it.
        """
        return self._end_run(run, self._finish_unless_passed)

    def _end_run(
        self, run: dg.DagsterRun, end_branch: Callable[[EndedRun, Reservations], Outcome]
    ) -> Outcome:
        name = run.tags.get(RunTag.BRANCH) or run_branch_name(run.run_id)
        ended_run, reservations = EndedRun(name, run), Reservations()
        states = self._states.load_all()
        checked = self._advance_states({name: ended_run}, states, self._advance_state, reservations)
        outcome = next(checked, None) or end_branch(ended_run, reservations)
        if outcome.state in _UNDECIDED:
            return self._fenced_outcome(run, name) or self._recorded_outcome(run, name) or outcome
        return outcome

    def _finish_unless_passed(self, ended_run: EndedRun, reservations: Reservations) -> Outcome:
        waiting = self._reserved_outcome(ended_run, reservations) if reservations else None
        assessment = waiting or self._assess(ended_run)
        if isinstance(assessment, Outcome):
            return assessment
        if assessment.candidate:
            return waiting_outcome(ended_run, "the run passed, and the publication sensor publishes it")
        return self._finish_run(assessment, assessment.already_published)

    def _assess_ended_run(self, ended_run: EndedRun) -> Outcome | AssessedRun:
        return self._assessor.assess(ended_run.branch, ended_run.run, all_steps_succeeded=True)

    def _send_candidates(self, candidates: Sequence[Candidate]) -> Mapping[str, Result | Exception]:
        # The run may have been taken for dead while its process was suspended.
        return self._publisher.publish(candidates, alive=lambda: self._require_publishable(candidates))

    def _require_publishable(self, candidates: Sequence[Candidate]) -> None:
        """Raise an error if a run that publishes itself was fenced, ended or judged while it was suspended.

        Raises ReferenceNotFound if its branch is gone, and RunBranchGone if it was ended or judged.
        """
        for candidate in candidates:
            self._client.reference(candidate.branch)
            run = self._instance.get_run_by_id(candidate.run_id)
            if run is None or run.is_finished or is_judged(run.tags, candidate.branch):
                raise RunBranchGone(
                    "The run was ended while it published itself.",
                    branch=candidate.branch,
                    run_id=candidate.run_id,
                    hint="Launch the run again.",
                    reason="ended_meanwhile",
                )

    def _fenced_outcome(self, run: dg.DagsterRun, name: str) -> Outcome | None:
        """Return the outcome of a run whose branch was deleted while it published itself; None if it was not.

        The run was taken for dead, and woke up. No later pass will find a branch, so the run must fail now.
        """
        base_hash = find_recorded_base(run.tags, name)
        if base_hash is None or self._find_branch(name):
            return None
        if publication := self._publisher.find_publication(name, base_hash):
            return Outcome(
                name, run.run_id, RunState.PUBLISHED, "by another publisher", None, publication.hash
            )
        reason = "the run was fenced: its branch is gone"
        report_branch_end(self._instance, run.run_id, name, verdict=FENCED, reason=reason)
        return Outcome(name, run.run_id, RunState.REFUSED, reason)

    def _recorded_outcome(self, run: dg.DagsterRun, name: str) -> Outcome | None:
        """Return the outcome if the run is recorded as blocked or refused, else None.

        Its verdict was recorded but a later step, such as deleting the branch, failed. The run must fail now,
        because perhaps no later pass will see it.
        """
        current = self._instance.get_run_by_id(run.run_id)
        if current is None or not is_judged(current.tags, name):
            return None
        status = current.tags.get(RunTag.STATUS)
        if status not in FAILING_STATUSES:
            return None
        return Outcome(name, run.run_id, RunState(status), current.tags.get(RunTag.REASON, ""))


class _PublishingExecutor(Executor):
    def __init__(self, inner: Executor, lakehouse_key: str) -> None:
        self._inner = inner
        self._lakehouse_key = lakehouse_key

    @property
    def retries(self) -> Any:
        return self._inner.retries

    @property
    def step_dependency_config(self) -> Any:
        return self._inner.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        clear_inherited_status(plan_context.instance, plan_context.run_id)
        failed = False
        for event in self._inner.execute(plan_context, execution_plan):
            failed |= event.is_step_failure
            yield event
        if failed:
            _print_on_command_line(
                f"Run {plan_context.run_id} failed, so nothing was published. {_SEE_STATUS}"
            )
            return
        outcome = self._publish(plan_context)
        if outcome is None:
            return
        _print_on_command_line(format_run_outcome(outcome))
        if outcome.state in (RunState.BLOCKED, RunState.REFUSED):
            raise NotPublished(
                format_failure("; ".join(outcome.reasons)),
                branch=outcome.branch,
                run_id=outcome.run_id,
                hint=outcome.next_step or None,
            )
        if outcome.state is not RunState.PUBLISHED:
            is_empty = outcome.state is RunState.DISCARDED
            message = f"{'Nothing to publish' if is_empty else LEFT_TO_SENSOR}: {outcome.detail}"
            yield build_engine_event(plan_context, message)

    def _publish(self, context: Any) -> Outcome | None:
        run = context.instance.get_run_by_id(context.run_id)
        if run is None or not is_opened_by(run.tags, run.run_id):
            return None  # the run did not open a branch, so it changed no table
        branch = run.tags.get(RunTag.BRANCH, "")
        try:
            return self._judge_and_publish(context, run, branch)
        except Exception as error:  # noqa: BLE001 - the run passed; the sensor retries the publication
            return Outcome(branch, run.run_id, RunState.TRY_AGAIN, format_error(error))

    def _judge_and_publish(self, context: Any, run: dg.DagsterRun, branch: str) -> Outcome | None:
        lake = self._find_lake(context)
        settings = lake.settings
        if branch == MAIN or run.tags.get(RunTag.LAKE) != settings.lake_id:
            return None  # the run is unbranched, or belongs to another lake
        store, interval = HeartbeatStore.from_settings(settings), settings.heartbeat_interval_s
        publication = RunPublication.from_lake(lake, context.instance, asset_graph_of(context.job))

        def publish() -> Outcome:
            # The heartbeat of the steps ended with their resources. The reaper must see that the run goes on.
            with send_heartbeats(store, branch, run_id=run.run_id, interval_s=interval, kind="publisher"):
                if not settings.publish_in_run:
                    return publication.judge(run)
                # After that wait the sensor publishes the run, together with others in one commit.
                with acquire_pass_lock(settings, patience_s=_PATIENCE_S) as is_acquired:
                    return publication.publish(run) if is_acquired else publication.judge(run)

        return _publish_within(longest_pass_s(settings), publish, branch, run.run_id)

    def _find_lake(self, context: Any) -> Lakehouse:
        """Return the lake of the job's own resource, or of the environment if the job has none."""
        definition = context.job.get_definition().resource_defs.get(self._lakehouse_key)
        if definition is None:
            return LakehouseResource().lakehouse
        with dg.build_resources({self._lakehouse_key: definition}, instance=context.instance) as resources:
            resource: LakehouseResource = getattr(resources, self._lakehouse_key)
            return resource.lakehouse


def _publish_within(timeout_s: float, publish: Callable[[], Outcome], branch: str, run_id: str) -> Outcome:
    """Call `publish` and return its outcome, or TRY_AGAIN if it takes longer than `timeout_s` seconds.

    Errors of `publish` are raised. A storage or database that does not answer must not keep the run from
    ending. The call continues in its thread as long as the process lives. The sensor may publish at the same
    time; it also finishes a publication that the call left half done.
    """
    outcomes: Queue[Outcome | BaseException] = Queue()

    def put_outcome() -> None:
        try:
            outcomes.put(publish())
        except BaseException as error:  # noqa: BLE001 - raised below, in the run's own thread
            outcomes.put(error)

    Thread(target=copy_context().run, args=(put_outcome,), name="publication", daemon=True).start()
    try:
        outcome = outcomes.get(timeout=timeout_s)
    except Empty:
        message = f"the publication did not end within {timeout_s:g} s"
        return Outcome(branch, run_id, RunState.TRY_AGAIN, message)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
