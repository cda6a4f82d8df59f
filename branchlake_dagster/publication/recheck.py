"""Run checks on whole tables again, on a rebased state before it is published.

The state waits on a branch `publish-{run_id}` while a Dagster run executes the checks there. No state is kept
in memory between ticks: the branch and the tags of that run record the progress. If the checks of a state
fail, its runs are divided until the failing run is found.

One state holds all runs that wait for the same tables. With one state per run, every publication changed the
table under all the others, and nine waiting runs took forty check runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dagster import DagsterInstance, RunRecord, RunsFilter

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound, may_succeed_later
from branchlake_dagster.nessie.model import ContentKey, DiffEntry
from branchlake_dagster.publication.assessment import collect_evidence
from branchlake_dagster.publication.ledger import (
    Candidate,
    NeedsChecks,
    Published,
    Refused,
    Result,
    is_namespace_change,
    parse_publications,
)
from branchlake_dagster.publication.outcome import CheckRun
from branchlake_dagster.publication.publisher import Committer, PublicationContended
from branchlake_dagster.publication.verdict import RunEvidence
from branchlake_dagster.runs.branch_owner import branch_filter
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix, RunTag
from branchlake_dagster.wording import CodedReason, format_count, pluralize

PUBLICATION_BRANCH_FILTER = branch_filter(ReferencePrefix.PUBLICATION)
"""Nessie's filter for publication branches. They are named `publish-{run_id}`, after the oldest of their
runs."""


def publication_branch_name(run_id: str) -> str:
    """Return the name of the branch on which the rebased state of a run waits for its checks."""
    return f"{ReferencePrefix.PUBLICATION}{run_id}"


@dataclass(frozen=True)
class PreparedState:
    """A state on a branch of its own: `main` at `main_hash` plus one commit, on which checks can run.

    `hash` is the hash of that commit, and `changes` are its changes. `run_branches` are the run branches
    whose changes the state contains, oldest first. `tables` are the dotted names of the tables whose changes
    were replayed.
    """

    branch: str
    hash: str
    main_hash: str
    run_branches: tuple[str, ...]
    tables: tuple[str, ...]
    changes: tuple[DiffEntry, ...]

    @property
    def changed_keys(self) -> frozenset[ContentKey]:
        """The content keys that the state would change on `main`, without namespaces."""
        return frozenset(change.key for change in self.changes if not is_namespace_change(change))


class PreparedStates:
    """Creates prepared states, finds them again in a later process, and publishes them after their checks."""

    def __init__(self, client: NessieClient, committer: Committer) -> None:
        self._client = client
        self._committer = committer

    def prepare(
        self, batch: Sequence[Candidate]
    ) -> tuple[PreparedState | None, dict[str, Result | Exception]]:
        """Commit the rebased candidates to a publication branch, replacing an older branch of that name.

        Returns the state, or None if no candidate can be rebased. Also returns, by branch name, the results
        of candidates that are not in the state. A candidate that only conflicts with others of the state has
        no result. Raises PublicationContended if Nessie reports a conflict on the new branch.
        """
        plan, results = self._committer.plan_for_checks(batch)
        if not plan.accepted:
            return None, results
        candidates = list(plan.accepted)
        name = publication_branch_name(candidates[0].run_id)
        self.delete(name)
        try:
            self._client.create_branch(name, from_ref=MAIN, from_hash=plan.main_hash)
        except Exception:
            plan.discard()
            raise
        tables = tuple(sorted({table for rebased in plan.accepted.values() for table in rebased}))
        commit_hash = self._committer.send_commit(plan, name, {LakeProperty.REBASED: ",".join(tables)})
        if commit_hash is None:
            raise PublicationContended(
                "The rebased state could not be committed to its branch for the checks.",
                branch=name,
                run_id=candidates[0].run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        changes = tuple(self._client.diff(f"@{plan.main_hash}", f"@{commit_hash}"))
        run_branches = tuple(candidate.branch for candidate in candidates)
        return PreparedState(name, commit_hash, plan.main_hash, run_branches, tables, changes), results

    def load_all(self, names: Iterable[str] | None = None) -> list[PreparedState]:
        """Load the states that this or an earlier process has prepared. Incomplete states are left out.

        `names` are the names of the publication branches, if the caller has listed them already.
        """
        if names is None:
            names = [ref.name for ref in self._client.references(filter=PUBLICATION_BRANCH_FILTER)]
        return [state for name in names if (state := self._load_state(name))]

    def _load_state(self, name: str) -> PreparedState | None:
        try:
            entries = list(self._client.log(name, limit=1))
        except ReferenceNotFound:
            return None
        if not entries or LakeProperty.REBASED not in (properties := entries[0].commit.properties):
            return None  # the process died before the commit, or the branch is not ours
        commit = entries[0].commit
        main_hash = commit.parent_hashes[0]
        run_branches = tuple(publication.branch for publication in parse_publications(entries[0]))
        if (
            not run_branches
            or publication_branch_name(run_branches[0].removeprefix(run_branch_name(""))) != name
        ):
            return None
        tables = tuple(filter(None, properties[LakeProperty.REBASED].split(",")))
        changes = tuple(self._client.diff(f"@{main_hash}", f"@{commit.hash}"))
        return PreparedState(name, commit.hash, main_hash, run_branches, tables, changes)

    def publish(
        self, prepared: PreparedState, batch: Sequence[Candidate]
    ) -> dict[str, Result | Exception] | None:
        """Publish exactly the state that was checked, for all its candidates.

        Returns results by branch name: `Published` for all candidates or, if nothing was published, only the
        results of the candidates that caused this. Returns None if `main` has changed the same keys since.
        After None or an incomplete result a new state must be prepared.
        """
        plan, results, is_current = self._committer.plan_checked_state(batch, prepared.changes)
        if results:
            return results
        if not is_current:
            return None
        if not self._committer.can_read_files(prepared.changes):
            # A lost file of a run stays lost. A lost file of the state is written again with the next state.
            return dict(self._committer.find_unreadable(batch)) or None
        commit_hash = self._committer.send_commit(plan, MAIN)
        if commit_hash is None:
            return None
        return {
            candidate.branch: Published(
                commit_hash,
                rebased_tables=tuple(table for table in prepared.tables if table in candidate.tables),
            )
            for candidate in batch
        }

    def find_outside_merge(self, prepared: PreparedState) -> Published | None:
        """Find the merge by which a person published the prepared state to `main` before its checks ended.

        None if there is no such merge.
        """
        return self._committer.find_outside_merge(prepared.hash, base=prepared.main_hash)

    def delete(self, name: str) -> None:
        """Delete the branch `name` of a prepared state, if it exists.

        Raises NessieConflict if the branch has just moved.
        """
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return


MAX_CHECK_ATTEMPTS = 3
"""A check run that ended without a verdict is requested at most this often."""


@dataclass(frozen=True)
class PendingChecks:
    """The answer for a run whose state is not published or refused yet.

    `detail` says what the run waits for. `check_run` is the check run that the sensor must launch, or None.
    """

    detail: str
    check_run: CheckRun | None = None


RecheckResult = Published | Refused | NeedsChecks | PendingChecks | Exception


class Recheck:
    """Advances candidates that need checks by one step, whatever step an earlier pass or process reached.

    A check run that takes longer than `patience` is marked as failed and requested again. `now` returns the
    wall clock time.
    """

    def __init__(
        self,
        states: PreparedStates,
        instance: DagsterInstance,
        graph: AssetGraph,
        default_namespace: str,
        *,
        patience: timedelta,
        now: Callable[[], datetime],
    ) -> None:
        self._states = states
        self._instance = instance
        self._graph = graph
        self._default_namespace = default_namespace
        self._patience = patience
        self._now = now

    def prepare(self, members: Mapping[Candidate, RunEvidence]) -> dict[str, RecheckResult]:
        """Prepare a state with all `members`, oldest first, and request its checks.

        Returns the results by branch name.
        """
        try:
            prepared, results = self._states.prepare(list(members))
        except Exception as error:
            if len(members) == 1 or may_succeed_later(error):
                raise
            return self._prepare_separately(members)
        pending = PendingChecks("conflicts with a run whose state is being checked")
        answers: dict[str, RecheckResult] = {**_answer_all(members, pending), **results}
        if prepared is not None:
            state_members = {
                candidate: evidence
                for candidate, evidence in members.items()
                if candidate.branch in prepared.run_branches
            }
            answers |= self._request_checks(prepared, state_members, attempt=0)
        return answers

    def _prepare_separately(self, members: Mapping[Candidate, RunEvidence]) -> dict[str, RecheckResult]:
        """Prepare a state of one member alone, after the state of all members failed with an error.

        The members are tried in order until one of them has a state; the members after it wait. A member
        that fails alone gets its error as the result.
        """
        answers: dict[str, RecheckResult] = {}
        for candidate, evidence in members.items():
            if any(isinstance(answer, PendingChecks) for answer in answers.values()):
                answers[candidate.branch] = PendingChecks("waits for a run that is checked alone")
                continue
            try:
                answers |= self.prepare({candidate: evidence})
            except Exception as error:  # noqa: BLE001 - the error concerns this run alone
                answers[candidate.branch] = error
        return answers

    def pending_message(self, prepared: PreparedState) -> str | None:
        """Return a sentence with the check run that a state waits for; None if no check run is active.

        A check run that takes longer than the patience is marked as failed and no longer counts as active.
        """
        unfinished_runs = [
            run_record
            for run_record in self._load_check_runs(prepared)
            if not run_record.dagster_run.is_finished
        ]
        message = None
        for record in unfinished_runs:
            if self._is_overdue(record):
                minutes = self._patience.total_seconds() / 60
                self._instance.report_run_failed(record.dagster_run, f"No verdict within {minutes:g} min.")
            else:
                run_id = record.dagster_run.run_id
                message = f"waits for its checks on {prepared.branch} in run {run_id}"
        return message

    def advance(
        self, prepared: PreparedState, members: Mapping[Candidate, RunEvidence]
    ) -> dict[str, RecheckResult]:
        """Advance a state without an active check run: publish it, divide it, or request its checks again.

        `members` are all candidates of the state, with their evidence. Returns the results by branch name.
        """
        if (outside_merge := self._states.find_outside_merge(prepared)) is not None:
            self._states.delete(prepared.branch)
            return _answer_all(members, outside_merge)
        required_checks = _list_checks(members.values(), prepared)
        if not required_checks:
            return self._publish(prepared, members)  # the definitions no longer have such checks
        runs = [record.dagster_run for record in self._load_check_runs(prepared)]
        for run in runs:
            evidence = collect_evidence(
                self._instance,
                [run],
                self._graph,
                write_set=None,
                default_namespace=self._default_namespace,
                require_checks=False,
            )
            if all((check, None) in evidence.evaluations for check in required_checks):
                failures = [
                    f"{check} on {asset}: {(result.description or 'failed').rstrip('.')}"
                    for asset, check in required_checks
                    if not (result := evidence.evaluations[(asset, check), None]).passed
                    and result.is_blocking
                ]
                if not failures:
                    return self._publish(prepared, members)
                why = (
                    f"its checks fail together with the changes that main has now (run {run.run_id}):"
                    f" {'; '.join(failures)}"
                )
                return self._refuse_or_divide(prepared, members, CodedReason(why, "checks_failed"))
        if unfinished_ids := [run.run_id for run in runs if not run.is_finished]:
            # The run was launched after the call of `pending_message`, and may still give a verdict.
            return _answer_all(
                members,
                PendingChecks(f"waits for its checks on {prepared.branch} in run {unfinished_ids[0]}"),
            )
        if len(runs) >= MAX_CHECK_ATTEMPTS:
            why = (
                f"{MAX_CHECK_ATTEMPTS} check runs on the rebased table gave no verdict (last: run"
                f" {runs[0].run_id})"
            )
            return self._refuse_or_divide(prepared, members, CodedReason(why, "checks_gave_no_verdict"))
        return self._request_checks(prepared, members, attempt=len(runs))

    def _load_check_runs(self, prepared: PreparedState) -> Sequence[RunRecord]:
        tags = {RunTag.CHECK_HASH: prepared.hash, RunTag.CHECK_REF: prepared.branch}
        return self._instance.get_run_records(RunsFilter(tags=tags))

    def _is_overdue(self, record: RunRecord) -> bool:
        """Return whether a check run has been running longer than the patience.

        False for a run in Dagster's queue, because it has not started yet.
        """
        start_time = record.start_time
        return (
            start_time is not None and self._now() - datetime.fromtimestamp(start_time, UTC) > self._patience
        )

    def _publish(
        self, prepared: PreparedState, members: Mapping[Candidate, RunEvidence]
    ) -> dict[str, RecheckResult]:
        results = self._states.publish(prepared, list(members))
        self._states.delete(prepared.branch)
        if results is None:
            return self.prepare(members)
        waiting_reason = "the state that it shares with other runs is prepared again"
        return {**_answer_all(members, PendingChecks(waiting_reason)), **results}

    def _refuse_or_divide(
        self, prepared: PreparedState, members: Mapping[Candidate, RunEvidence], why: CodedReason
    ) -> dict[str, RecheckResult]:
        """Refuse the only member, or prepare the older half of several members alone.

        The other members wait, and are prepared after them. `why` is the reason of the refusal. Returns the
        results by branch name.
        """
        self._states.delete(prepared.branch)
        if len(members) == 1:
            return _answer_all(members, Refused(dict.fromkeys(prepared.tables, why)))
        older = dict(list(members.items())[: len(members) // 2])
        verb = pluralize(len(older), "is", "are")
        pending = PendingChecks(
            f"its checks failed together with other runs; {len(older)} of them {verb} checked without it"
            " first"
        )
        return {**_answer_all(members, pending), **self.prepare(older)}

    def _request_checks(
        self, prepared: PreparedState, members: Mapping[Candidate, RunEvidence], *, attempt: int
    ) -> dict[str, RecheckResult]:
        check_run = _build_check_run(prepared, members, _list_checks(members.values(), prepared), attempt)
        first, *others = prepared.run_branches
        pending = PendingChecks(
            f"waits for its checks on {prepared.branch}, together with {format_count(len(others), 'other')}"
        )
        return {first: PendingChecks(str(check_run), check_run), **dict.fromkeys(others, pending)}


def _answer_all(members: Mapping[Candidate, RunEvidence], answer: RecheckResult) -> dict[str, RecheckResult]:
    return dict.fromkeys((candidate.branch for candidate in members), answer)


def _list_checks(evidence: Iterable[RunEvidence], prepared: PreparedState) -> tuple[tuple[str, str], ...]:
    """Return the checks that read all rows of a rebased table, as sorted pairs (asset key, check name).

    `evidence` is that of the runs whose changes the prepared state contains. Returns () if no check must run
    again.
    """
    return tuple(
        sorted(
            {
                (asset, check)
                for run_evidence in evidence
                for asset, rules in run_evidence.rules.items()
                for check, tables in rules.whole_table_checks.items()
                if tables & set(prepared.tables)
            }
        )
    )


def _build_check_run(
    prepared: PreparedState,
    members: Mapping[Candidate, RunEvidence],
    checks: tuple[tuple[str, str], ...],
    attempt: int,
) -> CheckRun:
    tags = {
        RunTag.CHECK_REF: prepared.branch,
        RunTag.CHECK_HASH: prepared.hash,
        RunTag.CHECKS_FOR: ",".join(candidate.run_id for candidate in members),
    }
    return CheckRun(f"{prepared.branch}@{prepared.hash}/{attempt}", checks, prepared.branch, tags)
