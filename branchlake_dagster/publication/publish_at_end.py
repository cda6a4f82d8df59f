"""Judge and publish a run as its last step, instead of waiting for the publication sensor.

`branchlake_definitions(settings, definitions)` wraps the executor of the code location with `publish_at_end`.
A job with its own executor wraps it itself:

    dg.define_asset_job("prices_job", selection, executor_def=publish_at_end(dg.multiprocess_executor))

The run uses the publisher of the sensor. If the process dies, or Nessie does not answer, the sensor finds the
branch and continues from any state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from queue import Empty, Queue
from threading import Thread
from typing import Any

import click
import dagster as dg
from dagster import DagsterEvent, Executor

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.dagster import asset_graph_of, build_engine_event
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.assessment import AssessedRun
from branchlake_dagster.publication.ledger import Candidate, Result
from branchlake_dagster.publication.outcome import EndedRun, Outcome
from branchlake_dagster.publication.parked_runs import format_error
from branchlake_dagster.publication.pass_lock import acquire_pass_lock, longest_pass_s
from branchlake_dagster.publication.reconciler import BranchPublisher, Reservations, waiting_outcome
from branchlake_dagster.runs.discarding import FAILING_STATUSES, format_failure, report_branch_end
from branchlake_dagster.runs.heartbeats import HeartbeatStore, send_heartbeats
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource, record_branch_heads
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import FENCED, RunState, find_recorded_base, is_judged, is_opened_by
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import RunBranchGone

LEFT_TO_SENSOR = "Left to the publication sensor"
"""Start of the message of the event by which a run reports that it could not publish itself."""
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
    subject, reasons = f"Run {outcome.run_id}", " ".join(_format_reasons(outcome).split()).rstrip(".")
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

    The run must have opened a branch, and all its steps must have succeeded. The outcomes are those of an
    ended run. Dagster does not show the run as finished yet.
    """

    def publish(self, run: dg.DagsterRun) -> Outcome:
        """Publish the run if it passes."""
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
        states = self._recheck.load_states()
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
        """Raise if a run that publishes itself was fenced, ended or judged while it was suspended."""
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
        """Return the recorded outcome of a run whose clean-up failed; None if none is recorded.

        The run must fail now, because perhaps no later pass will see it.
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
        failed = False
        for event in self._inner.execute(plan_context, execution_plan):
            failed |= event.is_step_failure
            if event.is_step_success:
                # For steps in this process: a branch that is reset during a later step is noticed.
                record_branch_heads(plan_context.run_id)
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
                format_failure(_format_reasons(outcome)),
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
    """Return the outcome of `publish`, or TRY_AGAIN if it takes longer than `timeout_s` seconds.

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


def _format_reasons(outcome: Outcome) -> str:
    blocked = outcome.state is RunState.BLOCKED and outcome.verdict is not None
    return "; ".join(outcome.verdict.reasons) if blocked and outcome.verdict else outcome.detail
