"""Checks on whole tables, made again on a rebased state before it may be published.

The state waits on a branch `publish-{run_id}` while a Dagster run makes the checks there. Nothing is
remembered between ticks: the branch and that run's tags say how far it is.
"""

from __future__ import annotations

from dagster import DagsterInstance, RunsFilter
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph

from branchlake_dagster.branching.run_tags import CHECK_HASH_TAG, CHECK_REF_TAG
from branchlake_dagster.publication.candidate import Candidate, Prepared, Published, Refused
from branchlake_dagster.publication.evidence import RunEvidence, collect
from branchlake_dagster.publication.outcome import CheckRun
from branchlake_dagster.publication.prepared import PreparedStates

ATTEMPTS = 3
"""How often a run that died without a verdict is asked for again."""


class Recheck:
    """Takes a candidate that needs checks one step further, from whatever state it is found in."""

    def __init__(
        self,
        states: PreparedStates,
        instance: DagsterInstance,
        graph: BaseAssetGraph,  # type: ignore[type-arg]
        default_namespace: str,
    ) -> None:
        self._states = states
        self._instance = instance
        self._graph = graph
        self._default_namespace = default_namespace

    def advance(self, candidate: Candidate, evidence: RunEvidence) -> Published | Refused | CheckRun | str:
        """The result; a run to launch; or, as text, what it waits for."""
        prepared = self._states.find(candidate.run_id)
        if prepared is None:
            return self._prepare(candidate, evidence)
        runs = self._instance.get_runs(RunsFilter(tags={CHECK_HASH_TAG: prepared.hash}))
        if any(not run.is_finished for run in runs):
            return f"waits for its checks on {prepared.branch} in run {runs[0].run_id}"
        wanted = _checks(evidence, prepared)
        for run in runs:
            found = collect(
                self._instance,
                [run],
                self._graph,
                write_set=frozenset(),
                default_namespace=self._default_namespace,
                require_checks=False,
            )
            if all((check, None) in found.evaluations for check in wanted):
                return self._judged(candidate, evidence, prepared, found, wanted, run.run_id)
        if len(runs) >= ATTEMPTS:
            self._states.forget(candidate.run_id)
            why = f"rebased, its checks gave no verdict {ATTEMPTS} times (last in run {runs[0].run_id})"
            return Refused(dict.fromkeys(prepared.tables, why))
        return _check_run(candidate, prepared, wanted, len(runs))

    def _prepare(self, candidate: Candidate, evidence: RunEvidence) -> Published | Refused | CheckRun:
        prepared = self._states.prepare(candidate)
        if not isinstance(prepared, Prepared):
            return prepared
        return _check_run(candidate, prepared, _checks(evidence, prepared), 0)

    def _judged(
        self,
        candidate: Candidate,
        evidence: RunEvidence,
        prepared: Prepared,
        found: RunEvidence,
        wanted: tuple[tuple[str, str], ...],
        run_id: str,
    ) -> Published | Refused | CheckRun:
        failed = [
            f"{check} on {asset}: {result.description or 'failed'}"
            for asset, check in wanted
            if not (result := found.evaluations[(asset, check), None]).passed and result.blocks
        ]
        if failed:
            self._states.forget(candidate.run_id)
            why = f"with what main has now, its checks fail (run {run_id}): {'; '.join(failed)}"
            return Refused(dict.fromkeys(prepared.tables, why))
        done = self._states.publish(candidate, prepared)
        self._states.forget(candidate.run_id)
        return self._prepare(candidate, evidence) if done is None else done


def _checks(evidence: RunEvidence, prepared: Prepared) -> tuple[tuple[str, str], ...]:
    """The (asset, check) pairs that see all rows of a table that was rebased."""
    return tuple(
        sorted(
            (asset, check)
            for asset, rules in evidence.rules.items()
            for check, tables in rules.whole_tables.items()
            if tables & set(prepared.tables)
        )
    )


def _check_run(
    candidate: Candidate, prepared: Prepared, checks: tuple[tuple[str, str], ...], attempt: int
) -> CheckRun:
    tags = {
        CHECK_REF_TAG: prepared.branch,
        CHECK_HASH_TAG: prepared.hash,
        "branchlake/checks_for": candidate.run_id,
    }
    return CheckRun(f"{prepared.branch}@{prepared.hash}/{attempt}", checks, prepared.branch, tags)
