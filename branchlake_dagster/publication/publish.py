"""Publish one finished run in the caller's process, by the same steps as the publication sensor."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.assessment import NO_TABLE_CHANGED
from branchlake_dagster.publication.outcome import CheckRun, Outcome
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    NO_VALUE,
    PENDING,
    RunLocation,
    RunState,
    find_publication,
    find_run_location,
)
from branchlake_dagster.stored_names import RunTag

_UNPUBLISHED_STATES = (RunState.BLOCKED, RunState.REFUSED, RunState.UNBRANCHED)
"""Recorded states that `publish()` returns as they are. With any other, the branch was discarded."""

_MAX_PASSES = 20
"""Each pass except the last one runs the checks that the pass before requested."""


class RunUnknown(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The Dagster instance has no run of this id, so nothing can be judged."""


@dataclass(frozen=True)
class RunOutcome:
    """What became of one run: whether `main` has it, and if not, why.

    Attributes:
        run_id (str): The run.
        status (str): `published`; `blocked` by the gate; `refused` because its changes conflict with newer
            changes of `main`; `discarded` because it failed or changed no table; `waiting`, `checking` or
            `try again` if there is no decision yet; `unbranched` if it wrote to `main` directly; `set aside`
            if judging it failed again and again.
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
        """Whether `main` has the run."""
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
    gate, commit, tags and observations. The run's branch does not exist afterwards. Sensors may work at the
    same time. If `main` has changed, some checks of whole tables must run again; they run in this process. A
    judged run is not judged again: the function returns the recorded outcome, with the reasons as its tags
    hold them (at most 250 characters).

    Args:
        run (str | ExecuteInProcessResult | DagsterRun): The run, its id, or the result of
            `execute_in_process` or `materialize`.
        definitions (Definitions): The assets and all of their checks. The gate blocks a run that left out a
            check.
        instance (Optional[DagsterInstance]): The instance that has the run. (default: the one of
            `DAGSTER_HOME`)
        lakehouse (Optional[Lakehouse | LakehouseResource]): The lake. (default: the `LakehouseResource`
            among the resources of `definitions`)

    Returns:
        RunOutcome: The status, the reasons if the run is not published, and the commit if it is. A blocked
        or refused run is returned as an outcome, not raised as an error.

    Raises:
        RunUnknown: The instance does not have this run. A run of `dg.materialize(…)` without an `instance`
            is forgotten when it ends.
        ConfigurationError: The definitions have no `LakehouseResource`, and `lakehouse` is None.

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
    lake = _find_lake(definitions, lakehouse)
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


def _find_lake(definitions: dg.Definitions, lakehouse: Lakehouse | LakehouseResource | None) -> Lakehouse:
    resources = (definitions.resources or {}).values()
    configured_lake = lakehouse or next(
        (resource for resource in resources if isinstance(resource, LakehouseResource)), None
    )
    if configured_lake is None:
        raise ConfigurationError(
            "The definitions have no LakehouseResource among their resources, so the lake is unknown.",
            hint="Merge branchlake_definitions() into the definitions, or call publish(…, lakehouse=…).",
            reason="lake_unknown",
        )
    return configured_lake.lakehouse if isinstance(configured_lake, LakehouseResource) else configured_lake


def _run_checks(definitions: dg.Definitions, instance: dg.DagsterInstance, check_run: CheckRun) -> None:
    """Run the checks that a rebased state needs, as the daemon would. A failed check raises no error here."""
    request = check_run.to_run_request()
    job = definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection=set(), asset_check_selection=set(request.asset_check_keys or [])
    )
    job.execute_in_process(instance=instance, tags=dict(request.tags), raise_on_error=False)


def _to_run_outcome(run_id: str, outcome: Outcome) -> RunOutcome:
    verdict = outcome.verdict
    reasons: tuple[str, ...] = ()
    if outcome.state is not RunState.PUBLISHED:
        blocked = outcome.state is RunState.BLOCKED and verdict is not None
        reasons = verdict.reasons if blocked and verdict is not None else (outcome.detail,)
    warnings = verdict.warnings if verdict is not None else ()
    return RunOutcome(run_id, outcome.state, reasons, warnings, outcome.publication, outcome.tables)


def _recorded_outcome(run: dg.DagsterRun, run_location: RunLocation) -> RunOutcome:
    """Return the outcome of a run whose branch does not exist any more, from its tags."""
    if commit := find_publication(run.tags, run_location.branch):
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
