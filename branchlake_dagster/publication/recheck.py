"""Checks on whole tables, made again on a rebased state before it may be published.

The state waits on a branch `publish-{run_id}` while a Dagster run makes the checks there. Nothing is
remembered between ticks: the branch and that run's tags say how far it is. A state that fails is divided
until it is known which of its runs is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dagster import DagsterInstance, RunRecord, RunsFilter

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.nessie.errors import may_pass
from branchlake_dagster.publication.evidence import RunEvidence, collect
from branchlake_dagster.publication.ledger import Candidate, NeedsChecks, Published, Refused
from branchlake_dagster.publication.outcome import CheckRun
from branchlake_dagster.publication.publisher import Prepared, PreparedStates
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import Reason, agree, counted

ATTEMPTS = 3
"""How often a run that died without a verdict is asked for again."""


@dataclass(frozen=True)
class Waits:
    """No answer yet: what it waits for, and the run to launch for that."""

    detail: str
    check_run: CheckRun | None = None


Answer = Published | Refused | NeedsChecks | Waits | Exception


class Recheck:
    """Takes candidates that need checks one step further, from whatever state they are found in.

    `patience`: how long a run may check before it is given up and asked for again. `now` is the wall clock.
    """

    def __init__(
        self,
        states: PreparedStates,
        instance: DagsterInstance,
        graph: AssetGraph,
        default_namespace: str,
        *,
        patience: timedelta,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._states = states
        self._instance = instance
        self._graph = graph
        self._default_namespace = default_namespace
        self._patience = patience
        self._now = now

    def under_way(self, names: Iterable[str] | None = None) -> list[Prepared]:
        """The states that wait for their checks; `names` of their branches, where they are known already."""
        return self._states.all(names)

    def prepare(self, members: Mapping[Candidate, RunEvidence]) -> dict[str, Answer]:
        """Make a state of all `members`, oldest first, and ask for its checks; the answers by branch."""
        try:
            prepared, results = self._states.prepare(list(members))
        except Exception as error:
            if len(members) == 1 or may_pass(error):
                raise
            return self._prepare_first(members)
        later = Waits("collides with a run whose state is being checked")
        answers: dict[str, Answer] = {**_all(members, later), **results}
        if prepared is not None:
            within = {one: told for one, told in members.items() if one.branch in prepared.members}
            answers |= self._ask(prepared, within, attempt=0)
        return answers

    def _prepare_first(self, members: Mapping[Candidate, RunEvidence]) -> dict[str, Answer]:
        """A state of one of them alone, because one spoils that of all; that one has the error."""
        answers: dict[str, Answer] = {}
        for one, evidence in members.items():
            if any(isinstance(answer, Waits) for answer in answers.values()):
                answers[one.branch] = Waits("waits for a run that is checked alone")
                continue
            try:
                answers |= self.prepare({one: evidence})
            except Exception as error:  # noqa: BLE001 - it concerns this run alone
                answers[one.branch] = error
        return answers

    def at_work(self, prepared: Prepared) -> str | None:
        """What a state waits for; None when no run checks it now. A run that takes too long is given up."""
        unfinished = [one for one in self._runs_of(prepared) if not one.dagster_run.is_finished]
        waited_for = None
        for record in unfinished:
            if self._overdue(record):
                minutes = self._patience.total_seconds() / 60
                self._instance.report_run_failed(record.dagster_run, f"No verdict within {minutes:g} min.")
            else:
                run_id = record.dagster_run.run_id
                waited_for = f"waits for its checks on {prepared.branch} in run {run_id}"
        return waited_for

    def advance(self, prepared: Prepared, members: Mapping[Candidate, RunEvidence]) -> dict[str, Answer]:
        """What becomes of a state that nobody checks now and of its runs, `members`; answers by branch."""
        if (merged := self._states.merged_by_hand(prepared)) is not None:
            self._states.forget(prepared.branch)
            return _all(members, merged)
        wanted = _checks(members.values(), prepared)
        if not wanted:
            return self._publish(prepared, members)  # the code asks for none any more
        runs = [record.dagster_run for record in self._runs_of(prepared)]
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
                failed = [
                    f"{check} on {asset}: {(result.description or 'failed').rstrip('.')}"
                    for asset, check in wanted
                    if not (result := found.evaluations[(asset, check), None]).passed and result.blocks
                ]
                if not failed:
                    return self._publish(prepared, members)
                why = f"with what main has now, its checks fail (run {run.run_id}): {'; '.join(failed)}"
                return self._divide(prepared, members, Reason(why, "checks_failed"))
        if unfinished := [run.run_id for run in runs if not run.is_finished]:
            # Launched since `at_work` looked. A run that still works has not failed to give a verdict.
            return _all(members, Waits(f"waits for its checks on {prepared.branch} in run {unfinished[0]}"))
        if len(runs) >= ATTEMPTS:
            why = f"rebased, its checks gave no verdict {ATTEMPTS} times (last in run {runs[0].run_id})"
            return self._divide(prepared, members, Reason(why, "checks_gave_no_verdict"))
        return self._ask(prepared, members, attempt=len(runs))

    def release(self, prepared: Prepared) -> None:
        """Give a state up: some of its runs do not wait any more."""
        self._states.forget(prepared.branch)

    def _runs_of(self, prepared: Prepared) -> Sequence[RunRecord]:
        tags = {RunTag.CHECK_HASH: prepared.hash, RunTag.CHECK_REF: prepared.branch}
        return self._instance.get_run_records(RunsFilter(tags=tags))

    def _overdue(self, record: RunRecord) -> bool:
        """Whether a run checks for too long. One that still waits in Dagster's queue has not begun."""
        began = record.start_time
        return began is not None and self._now() - datetime.fromtimestamp(began, UTC) > self._patience

    def _publish(self, prepared: Prepared, members: Mapping[Candidate, RunEvidence]) -> dict[str, Answer]:
        done = self._states.publish(prepared, list(members))
        self._states.forget(prepared.branch)
        if done is None:
            return self.prepare(members)
        again = "the state that it shared with others is made anew"
        return {**_all(members, Waits(again)), **done}

    def _divide(
        self, prepared: Prepared, members: Mapping[Candidate, RunEvidence], why: Reason
    ) -> dict[str, Answer]:
        """Refuse the only one; of several, try the older half alone: the others wait and come after it."""
        self._states.forget(prepared.branch)
        if len(members) == 1:
            return _all(members, Refused(dict.fromkeys(prepared.tables, why)))
        older = dict(list(members.items())[: len(members) // 2])
        are = agree(len(older), "is", "are")
        waits = Waits(f"together with others its checks failed; {len(older)} of them {are} tried without it")
        return {**_all(members, waits), **self.prepare(older)}

    def _ask(
        self, prepared: Prepared, members: Mapping[Candidate, RunEvidence], *, attempt: int
    ) -> dict[str, Answer]:
        run = _check_run(prepared, members, _checks(members.values(), prepared), attempt)
        first, *others = prepared.members
        waits = Waits(
            f"waits for its checks on {prepared.branch}, together with {counted(len(others), 'other')}"
        )
        return {first: Waits(str(run), run), **dict.fromkeys(others, waits)}


def _all(members: Mapping[Candidate, RunEvidence], answer: Answer) -> dict[str, Answer]:
    return dict.fromkeys((one.branch for one in members), answer)


def _checks(evidence: Iterable[RunEvidence], prepared: Prepared) -> tuple[tuple[str, str], ...]:
    """The (asset, check) pairs that see all rows of a table that was rebased."""
    return tuple(
        sorted(
            {
                (asset, check)
                for told in evidence
                for asset, rules in told.rules.items()
                for check, tables in rules.whole_tables.items()
                if tables & set(prepared.tables)
            }
        )
    )


def _check_run(
    prepared: Prepared,
    members: Mapping[Candidate, RunEvidence],
    checks: tuple[tuple[str, str], ...],
    attempt: int,
) -> CheckRun:
    tags = {
        RunTag.CHECK_REF: prepared.branch,
        RunTag.CHECK_HASH: prepared.hash,
        RunTag.CHECKS_FOR: ",".join(one.run_id for one in members),
    }
    return CheckRun(f"{prepared.branch}@{prepared.hash}/{attempt}", checks, prepared.branch, tags)
