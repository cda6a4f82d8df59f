"""Schedules by the thousand. One of them by its seed: `python -m branchlake_dagster_tests.simulation SEED`.

`BRANCHLAKE_TEST_SIM_SCHEDULES` sets how many are played, `BRANCHLAKE_TEST_SIM_SEED` with which seed they begin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from branchlake_dagster.cleanup import sweep_plan
from branchlake_dagster.cleanup import sweep_plan as made_on_branch
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import DiffAt, Operation, Reference, Unchanged
from branchlake_dagster.publication import assessment as assess
from branchlake_dagster.publication import conflicts as overlap_rules
from branchlake_dagster.publication import publisher as committer
from branchlake_dagster.publication import rebase_plan as commit_plan
from branchlake_dagster.publication import reconciler as pass_lock
from branchlake_dagster.publication.conflicts import Overlap
from branchlake_dagster.publication.ledger import BaseNotOnMain, MainLog
from branchlake_dagster.publication.outcome import EndedRun
from branchlake_dagster.publication.publisher import Committer
from branchlake_dagster.publication.rebase_plan import CommitPlan
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.replay import StagedState
from branchlake_dagster.publication.table_change import ChangeMode, TableChange
from branchlake_dagster.publication.verdict import Decision, Verdict
from branchlake_dagster.runs.branch_commits import BranchCommits
from branchlake_dagster.runs.branch_owner import BranchOrigin, Maker, OriginFinder
from branchlake_dagster.runs.run_events import EventPosition
from branchlake_dagster_tests.simulation.faults import Fault
from branchlake_dagster_tests.simulation.play import BY_OTHERS, failures, play

SCHEDULES = int(os.environ.get("BRANCHLAKE_TEST_SIM_SCHEDULES", "2000"))
FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_SIM_SEED", "0"))

pytestmark = pytest.mark.chaos

_ROOT = Path(__file__).parents[2]
_SHOWN = 3
_WANTED = (
    *(fault.value for fault in Fault if fault is not Fault.NONE),
    *("published", "refused", "blocked", "discarded", "checking", "try again"),
    *BY_OTHERS,
    "database is locked",
    *("rebased", "group commit", "retry", "late", "late write failed", "deleted", "files swept"),
)
"""What must have happened somewhere: schedules in which nothing happens prove nothing."""


def _played(first: int, count: int) -> tuple[str, dict[str, int]]:
    """The stories of failed schedules, and what happened, from a process of its own."""
    command = [sys.executable, "-m", "branchlake_dagster_tests.simulation", str(first), str(count)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    *stories, told = done.stdout.rstrip().rsplit("\n", 1)
    return "\n".join(stories), json.loads(told)["seen"]


@pytest.mark.timeout(600 + SCHEDULES // 5)
def test_schedules() -> None:
    processes = min(os.cpu_count() or 1, SCHEDULES)
    share = -(-SCHEDULES // processes)
    with ThreadPoolExecutor(processes) as pool:
        firsts = [FIRST_SEED + i * share for i in range(processes)]
        results = list(pool.map(_played, firsts, [share] * processes))
    stories = [story for text, _ in results for story in text.split("\n\n") if story.strip()]
    if stories:
        pytest.fail("\n\n".join([f"{len(stories)} schedules failed", *stories[:_SHOWN]]), pytrace=False)
    seen: Counter[str] = sum((Counter(counted) for _, counted in results), Counter())
    assert SCHEDULES < 2000 or [name for name in _WANTED if not seen[name]] == []


def test_a_seed_is_one_schedule() -> None:
    """What a failure prints can be played again."""
    with _bug("no lookup"):
        seed = next(_noticed("no lookup"))
        assert play(seed).failure == play(seed).failure


# -- does it find anything? ----------------------------------------------------------------------------


_SENDS: ContextVar[bool] = ContextVar("_SENDS", default=False)
"""Whether this actor is inside `send`: what one of them patches for a while, others restore too early."""


def _discarding_send(self: Committer, plan: CommitPlan, branch: str, *more: Any, **named: Any) -> str | None:
    """`send`, whose commits are judged as `_judged` does."""
    token = _SENDS.set(True)
    try:
        return _SEND(self, plan, branch, *more, **named)
    finally:
        _SENDS.reset(token)


def _judged(self: NessieClient, *args: Any, **kwargs: Any) -> object:
    """`commit`, taking an unknown outcome inside `send` for a failure."""
    try:
        return _COMMIT(self, *args, **kwargs)
    except NessieOutcomeUnknown as error:
        if _SENDS.get():
            raise NessieConflict(error.message) from error
        raise


_SEND, _RUN, _OPERATIONS = Committer.send_commit, RetryPolicy.run_attempts, CommitPlan.build_operations
_COMMIT = NessieClient.commit
_MADE_ON = made_on_branch.collect_branch_output
_DELETE = NessieClient.delete_branch
_REFERENCES, _DIFF_AT = NessieClient.references, NessieClient.diff_at


def _always_repeated(
    self: RetryPolicy, attempt: object, *, sleep: object, repeatable: bool = False
) -> object:
    return _RUN(self, attempt, sleep=sleep, repeatable=True)


def _unguarded(self: CommitPlan) -> list[Operation]:
    found = _OPERATIONS(self)
    return [one for one in found if not isinstance(one, Unchanged)] or found


def _discarded(self: CommitPlan, values: Mapping[object, object]) -> None:
    for value in values.values():
        if isinstance(value, StagedState):
            self.tables.discard(value)


def _delete_now(self: NessieClient, name: str, *, expected_hash: str) -> None:
    _DELETE(self, name, expected_hash=self.reference(name).hash)


def _remembered_listing(self: NessieClient, **of: Any) -> Iterator[Reference]:
    for ref in _REFERENCES(self, **of):
        vars(self).setdefault("listed", {})[ref.name] = ref.hash
        yield ref


def _diff_of_the_listing(self: NessieClient, from_ref: str, to_ref: str) -> DiffAt:
    listed = vars(self).get("listed", {}).get(to_ref)
    return _DIFF_AT(self, from_ref, f"{to_ref}@{listed}" if listed else to_ref)


def _by_files(mine: TableChange, theirs: TableChange) -> Overlap | None:
    """`overlap` without what was recorded of replaced partitions."""
    blind = [
        replace(one, steps=tuple(replace(s, recorded_predicate=None) for s in one.steps))
        for one in (mine, theirs)
    ]
    return _OVERLAP(*blind)


def _mapped_blindly(mine: TableChange, theirs: TableChange) -> TableChange:
    """`mapped`, by partition alone: as though a new file held only what the run had replaced."""
    for other in theirs.steps:
        if other.mode is ChangeMode.COMPACT:
            gone = {file.path: file.partition for file in other.removed}
            steps = []
            for step in mine.steps:
                where = {gone[file.path] for file in step.removed if file.path in gone}
                kept = [file for file in step.removed if file.path not in gone]
                new = [file for file in other.added if file.partition in where]
                steps.append(replace(step, removed=(*kept, *new)))
            mine = replace(mine, steps=tuple(steps))
    return mine


_OVERLAP = commit_plan.find_overlap


class _OneKey(made_on_branch.BranchOutput):
    """What a branch made, with no other relatives than the tables of its own keys."""

    normalized_folders = earlier_metadata = frozenset()


def _everything_named(
    log: Any, base: Mapping[Any, str], base_hash: str, files: Any
) -> made_on_branch.BranchOutput:
    """`made_on`, taking all that the branch gave a name for its own, but for the state of that key before."""
    found = _MADE_ON(log, base, base_hash, files)
    known = {
        one.snapshot_id
        for key in found.changed_keys & base.keys()
        for one in files.metadata(base[key]).snapshots
    }
    every = {one.snapshot_id: one for state in found.named_metadata.values() for one in state.snapshots}
    mine = {number: one for number, one in every.items() if number not in known}
    return _OneKey(found.changed_keys, found.named_metadata, found.named_metadata, mine)


def _without_hands(
    self: MainLog, client: NessieClient, branch: str, *, head_hash: object = None, **of: Any
) -> object:
    return _PUBLISHED(self, client, branch, **of)


def _without_roll_backs(self: MainLog, *args: Any, **of: Any) -> object:
    try:
        return _PUBLISHED(self, *args, **of)
    except BaseNotOnMain:
        return None


def _unguarded_look(self: Reconciler, one: EndedRun) -> object:
    return self._assess_ended_run(one)


_PUBLISHED = MainLog.find_publication

_BUGS = {
    "branches are deleted wherever they stand": (NessieClient, "delete_branch", _delete_now),
    "the listing is taken for the end": (
        (NessieClient, "references", _remembered_listing),
        (NessieClient, "diff_at", _diff_of_the_listing),
        (BranchCommits, "find_objection", lambda self, read_metadata: None),
    ),
    "what is judged is not claimed": (
        (assess, "claim_branch", lambda client, branch: (branch.hash, False)),
        (BranchCommits, "find_objection", lambda self, read_metadata: None),
    ),
    "no lookup": (
        (Committer, "_find_earlier_result", lambda self, candidate, at: None),
        (TableChange, "shared_steps", lambda self, other: None),
    ),
    "merges by hand are not looked for": (
        (MainLog, "find_publication", _without_hands),
        (MainLog, "find_merges", lambda self, client, **_: {}),
    ),
    "roll-backs are not looked for": (MainLog, "find_publication", _without_roll_backs),
    "one run's error ends the pass": (Reconciler, "_assess", _unguarded_look),
    "an unknown outcome is a failure": (
        (Committer, "send_commit", _discarding_send),
        (NessieClient, "commit", _judged),
    ),
    "commits are repeated blindly": (RetryPolicy, "run_attempts", _always_repeated),
    "nothing overlaps": (commit_plan, "find_overlap", lambda mine, theirs: None),
    "a replaced partition is what its files touched": (commit_plan, "find_overlap", _by_files),
    "deletes are not looked for": (overlap_rules, "_check_row_deletes", lambda step, own, theirs: None),
    "what is not carried is dropped": (overlap_rules, "find_unreplayable", lambda mine, theirs: None),
    "compactions are mapped by a guess": (commit_plan, "map_over_compactions", _mapped_blindly),
    "reads are not compared": (CommitPlan, "_require_same_reads", lambda self, candidate, reads: None),
    "reads are not guarded": (CommitPlan, "build_operations", _unguarded),
    "the gate is open": (assess, "judge_evidence", lambda evidence, **_: Verdict(Decision.PASSED)),
    "commits of strangers are not looked for": (
        BranchCommits,
        "find_objection",
        lambda self, read_metadata: None,
    ),
    "commits that are missing are not looked for": (
        BranchCommits,
        "find_objection",
        lambda self, read_metadata: None,
    ),
    "Dagster's tag says what is published": (assess.Assessor, "_is_publication_lost", lambda *_: False),
    "events of several runs are ordered by storage id": (
        EventPosition,
        "__gt__",
        lambda self, other: self._storage_id > other._storage_id,
    ),
    "files of others are discarded": (CommitPlan, "_discard_values", _discarded),
    "what main has lost is taken for the run's": (sweep_plan, "_is_branch_base", lambda *_: True),
    "files are not opened": (committer, "find_unreadable_candidates", lambda tables, batch: {}),
    "a pass that stands still stops the others": (pass_lock, "_abandon", lambda *_, **__: None),
    "another instance's branches are reaped": (
        OriginFinder,
        "find_origin",
        lambda *_, **__: BranchOrigin(Maker.HERE),
    ),
    "the sweep looks at one key only": (sweep_plan, "collect_branch_output", _everything_named),
}
"""What to put in whose place; several where one alone is caught by another defence."""

_FOUND_AS = {
    "branches are deleted wherever they stand": "was at work and was fenced",
    "the listing is taken for the end": "was published without",
    "what is judged is not claimed": "in 2 states",
    "no lookup": "is in the ledger twice",
    "merges by hand are not looked for": "never quiet",
    "roll-backs are not looked for": "never quiet",
    "one run's error ends the pass": "breaks whoever looks at it",
    "an unknown outcome is a failure": "which was deleted",
    "commits are repeated blindly": "which was deleted",
    "nothing overlaps": "too many",
    "a replaced partition is what its files touched": "too many",
    "deletes are not looked for": "too many",
    "what is not carried is dropped": "missing [('~note'",
    "compactions are mapped by a guess": "missing [('p",
    "reads are not compared": "as it no longer was",
    "reads are not guarded": "as it no longer was",
    "the gate is open": "although its checks failed",
    "commits of strangers are not looked for": "stranger in",
    "commits that are missing are not looked for": "was published without",
    "Dagster's tag says what is published": "main lost its rows",
    "events of several runs are ordered by storage id": "that no check saw",
    "files of others are discarded": "which was deleted",
    "what main has lost is taken for the run's": "a sweep deleted",
    "files are not opened": "which was deleted",
    "a pass that stands still stops the others": "never quiet",
    "another instance's branches are reaped": "of another Dagster instance lost its branch",
    "the sweep looks at one key only": "which was deleted",
}


@contextmanager
def _bug(name: str) -> Iterator[None]:
    found: Any = _BUGS[name]
    with ExitStack() as stack:
        for wrong in found if isinstance(found[0], tuple) else (found,):
            stack.enter_context(patch.object(*wrong))
        yield


_SHOWS_AT: dict[str, int] = {
    "branches are deleted wherever they stand": 1509,
    "the listing is taken for the end": 444,
    "what is judged is not claimed": 84,
    "no lookup": 24,
    "merges by hand are not looked for": 36,
    "roll-backs are not looked for": 623,
    "one run's error ends the pass": 5,
    "an unknown outcome is a failure": 383,
    "commits are repeated blindly": 383,
    "nothing overlaps": 13,
    "a replaced partition is what its files touched": 30,
    "deletes are not looked for": 577,
    "what is not carried is dropped": 303,
    "compactions are mapped by a guess": 591,
    "reads are not compared": 0,
    "reads are not guarded": 0,
    "the gate is open": 0,
    "commits of strangers are not looked for": 466,
    "commits that are missing are not looked for": 490,
    "Dagster's tag says what is published": 167,
    "events of several runs are ordered by storage id": 999,
    "files of others are discarded": 27,
    "what main has lost is taken for the run's": 4023,
    "files are not opened": 357,
    "a pass that stands still stops the others": 18,
    "another instance's branches are reaped": 0,
    "the sweep looks at one key only": 5,
}
"""The seed of a schedule that shows each of them. Where it does not any more, those after it are searched."""


def _noticed(name: str, within: int = 8000) -> Iterator[int]:
    """The seeds that fail for the bug's own reason."""
    for played in failures(range(_SHOWS_AT[name], _SHOWS_AT[name] + within)):
        if _FOUND_AS[name] in (played.failure or "").rsplit("\n", 1)[-1]:
            yield played.seed


@pytest.mark.parametrize("name", _BUGS)
def test_it_finds_the_bug(name: str) -> None:
    with _bug(name):
        assert next(_noticed(name), None) is not None, f"8000 schedules did not notice: {name}"
