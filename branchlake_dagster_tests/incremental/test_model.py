"""Histories by the thousand. One of them by its seed: `python -m branchlake_dagster_tests.incremental SEED`.

`BRANCHLAKE_TEST_HISTORIES` sets how many are played, `BRANCHLAKE_TEST_HISTORIES_SEED` with which seed they begin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from dagster import TimeWindow

from branchlake_dagster.history import capture
from branchlake_dagster.history import capture as history
from branchlake_dagster.history.capture import ancestors_after
from branchlake_dagster.history.change import ChangeKind, ChangeLost, ChangeSet, Position
from branchlake_dagster.history.rows import RowReader
from branchlake_dagster.incremental import consumption as consuming
from branchlake_dagster.incremental import consumption_update, inputs, positions
from branchlake_dagster.incremental import pending as pending_partitions
from branchlake_dagster.incremental.affected_partitions import Reach
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.pending import ConsumerState
from branchlake_dagster.incremental.positions import ConsumptionRecord, Positions, PropertyUpdate
from branchlake_dagster_tests.incremental.consumers import PARTS, Kind, Step
from branchlake_dagster_tests.incremental.iceberg import Row
from branchlake_dagster_tests.incremental.lake import Lake, Refused, Run
from branchlake_dagster_tests.incremental.model_files import Partitions, model_files
from branchlake_dagster_tests.incremental.play import failures, play
from branchlake_dagster_tests.incremental.writing import Writer

pytestmark = pytest.mark.chaos

HISTORIES = int(os.environ.get("BRANCHLAKE_TEST_HISTORIES", "2000"))
FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_HISTORIES_SEED", "0"))

_ROOT = Path(__file__).parents[2]
_SHOWN = 3
_WRITES = (
    *("append", "replace part", "update", "move", "compact"),
    *("delete", "delete day", "delete part", "delete rows", "update rows"),
)
_WANTED = (
    *_WRITES,
    *(f"{one} on a branch" for one in _WRITES),
    *("roll back", "roll back a result", "main is set", "drop", "create", "expire"),
    *("partition", "partition removed", "redefine", "caught up in between"),
    *("discarded", "published", "caught up"),
    *(f"{pattern} of {what}" for pattern in ("rows", "keys", "range") for what in ("a change", "everything")),
    *(f"{pattern} of a change again" for pattern in ("rows", "keys", "range")),
    *("range of a change in order", "range of everything in order", "swap"),
    *("rename", "rename back", "column gone"),
    *("range of a change and the day before", "range of everything and the day before"),
    *("lost: rolled back", "lost: dropped and created again", "lost: its snapshots have expired"),
    "lost: the consumer's own table was rolled back",
    *("refused: another run of this consumer was published first", "both tables", "rows beyond main"),
    "refused: the same rows were replaced meanwhile",
)
"""What must have happened somewhere: histories in which nothing happens prove nothing."""


def _played(first: int, count: int) -> tuple[str, dict[str, int]]:
    """The stories of failed histories, and what happened, from a process of its own."""
    command = [sys.executable, "-m", "branchlake_dagster_tests.incremental", str(first), str(count)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    *stories, told = done.stdout.rstrip().rsplit("\n", 1)
    return "\n".join(stories), json.loads(told)["seen"]


@pytest.mark.timeout(600 + HISTORIES // 5)
def test_what_is_maintained_is_what_a_full_computation_gives() -> None:
    processes = min(os.cpu_count() or 1, HISTORIES)
    share = -(-HISTORIES // processes)
    with ThreadPoolExecutor(processes) as pool:
        firsts = [FIRST_SEED + i * share for i in range(processes)]
        results = list(pool.map(_played, firsts, [share] * processes))
    stories = [story for text, _ in results for story in text.split("\n\n") if story.strip()]
    if stories:
        pytest.fail("\n\n".join([f"{len(stories)} histories failed", *stories[:_SHOWN]]), pytrace=False)
    seen: Counter[str] = sum((Counter(counted) for _, counted in results), Counter())
    assert HISTORIES < 2000 or [name for name in _WANTED if not seen[name]] == []


def test_a_seed_is_one_history() -> None:
    """What a failure prints can be played again."""
    name = "what a run's branch added is not remembered"
    with _bug(name):
        seed = next(failures(range(_SHOWS_AT[name], _SHOWS_AT[name] + _WITHIN))).seed
        assert play(seed).failure == play(seed).failure


# -- does it find anything? ----------------------------------------------------------------------------

_WITHIN = 4000

_SINCE, _NET, _KIND, _ADVANCE = (
    history.snapshots_since,
    capture._net_files,
    capture._change_kind,
    positions.advance_positions,
)
_WITH_FILES = pending_partitions._partitions_with_files
_HIT, _KEY_ROWS = RowReader._iter_deleted_rows, inputs._iter_changed_keys


def _from_branch(self: Consumption) -> Positions:
    found = consuming._load_table_or_none(self._lake.own_catalog(), self.consumer.spec.identifier)
    return positions.read_positions(found.metadata.properties, table="") if found else Positions()


def _without_beyond(metadata: Any, position: Position, *, table: str) -> Any:
    return _SINCE(metadata, replace(position, unpublished_snapshots=()), table=table)


def _beyond_is_not_looked_for(metadata: Any, position: Position, *, table: str) -> Any:
    try:
        return _SINCE(metadata, position, table=table)
    except ChangeLost:
        if position.unpublished_snapshots and ancestors_after(metadata, position.snapshot_id)[1]:
            return []
        raise


def _compactions_add(steps: Any) -> Any:
    """As though a compaction were an append."""
    return _NET(
        [
            replace(one, kind=ChangeKind.APPEND, removed=()) if one.kind is ChangeKind.COMPACT else one
            for one in steps
        ]
    )


def _compactions_are_updates(*args: Any) -> ChangeKind:
    found = _KIND(*args)
    return ChangeKind.APPEND if found is ChangeKind.COMPACT else found


def _nothing_cancels(steps: Any) -> Any:
    added, removed, deletes = {}, {}, {}
    for step in steps:
        if step.kind is not ChangeKind.COMPACT:
            added |= {one.path: one for one in step.added}
            removed |= {one.path: one for one in step.removed if one.path not in added}
            deletes |= {capture._delete_file_key(one): one for one in step.deletes}
    return tuple(added.values()), tuple(removed.values()), tuple(deletes.values())


def _always_floor(now_at: Positions, now: ConsumptionRecord, *_: Any, **__: Any) -> PropertyUpdate:
    return _ADVANCE(now_at, now, (), None)


def _only_the_floor(*args: Any, **_: Any) -> PropertyUpdate:
    """`advance`, without the entries that make appending runs of one partition meet."""
    return _ADVANCE(*args)


def _compacted_is_gone(self: RowReader, before: Any) -> Any:
    """`_hit`, taking the rows of files that were only compacted for gone with them."""
    steps = tuple(
        replace(one, kind=ChangeKind.UPDATE) if one.kind is ChangeKind.COMPACT else one
        for one in self._change.steps
    )
    reader = RowReader(self._table, replace(self._change, steps=steps))
    reader._schema = self._schema
    return _HIT(reader, before)


def _each_by_itself(self: RowReader, before: Any) -> Any:
    """`_hit`, one delete file at a time."""
    for one in self._change.deletes:
        reader = RowReader(self._table, replace(self._change, deletes=(one,)))
        reader._schema = self._schema
        yield from _HIT(reader, before)


def _added_keys(*args: Any) -> Iterator[Any]:
    yield next(iter(_KEY_ROWS(*args)))


def _with_files_of_inputs(backlog: ConsumerState, keys: Any, table: Any, *more: Any) -> set[str]:
    return set() if table is backlog.own_table else _WITH_FILES(backlog, keys, table, *more)


def _void_stays(now_at: Positions, *args: Any, **more: Any) -> PropertyUpdate:
    return _ADVANCE(replace(now_at, void_partitions=frozenset()), *args, **more)


def _lost(self: Consumption) -> set[str] | None:
    try:
        return pending_partitions.pending_partitions(self.consumer_state())
    except ChangeLost:
        return None


_BUGS: dict[str, Any] = {
    "positions are read from the branch": (Consumption, "positions", property(_from_branch)),
    "what a run's branch added is not remembered": (history, "snapshots_since", _without_beyond),
    "a roll-back below it is not noticed": (history, "snapshots_since", _beyond_is_not_looked_for),
    "compactions add rows": (capture, "_net_files", _compactions_add),
    "compactions are not told apart": (capture, "_change_kind", _compactions_are_updates),
    "what was added and removed does not cancel": (capture, "_net_files", _nothing_cancels),
    "deletes of compacted files are forgotten": (RowReader, "_iter_deleted_rows", _compacted_is_gone),
    "deletes that are repeated count twice": (RowReader, "_iter_deleted_rows", _each_by_itself),
    "deletes before the position are not looked at": (RowReader, "_deletes_before", lambda _: []),
    "only rows that came have keys": (inputs, "_iter_changed_keys", _added_keys),
    "only rows that came have ranges": (ChangeSet, "files", lambda self: iter(self.added)),
    "the floor moves whatever is pending": (positions, "advance_positions", _always_floor),
    "another partition definition is not noticed": (
        consuming,
        "fit_positions",
        lambda found, consumer: found,
    ),
    "new partitions count as consumed": (Consumption, "is_covered", lambda *_: True),
    "what the own table holds of new partitions is not looked for": (
        pending_partitions,
        "_partitions_with_files",
        _with_files_of_inputs,
    ),
    "days that depend on a row of the day before are forgotten": (
        Reach,
        "affected_interval",
        lambda self, definition, start, end: TimeWindow(start, end),
    ),
    "results that were rolled back count": (Positions, "without_lost", lambda found, _: found),
    "entries that count for nothing stay": (positions, "advance_positions", _void_stays),
    "new partitions are not looked for": (pending_partitions, "_partitions_with_rows", lambda *_: set()),
    "a lost floor never moves again": (consumption_update, "find_pending_or_none", _lost),
    "runs of one consumer look alike": (
        (ConsumptionRecord, "to_json", lambda self: _TEXT(replace(self, run_id="", base_hash=""))),
        (positions, "advance_positions", _only_the_floor),
    ),
    "appending runs do not meet": (positions, "advance_positions", _only_the_floor),
    "results of an earlier day are forgotten": (
        pending_partitions,
        "_outdated_partitions",
        lambda *_: set(),
    ),
    "later days do not follow": (pending_partitions, "with_successors", lambda _, found, __: set(found)),
}
"""What to put in whose place."""

_TEXT = ConsumptionRecord.to_json
_FOUND_AS = {
    "entries that count for nothing stay": "never catches up",
    "a lost floor never moves again": "never catches up",
    "compactions are not told apart": "a compaction counts as a change",
}

_SHOWS_AT: dict[str, int] = {
    "positions are read from the branch": 6,
    "what a run's branch added is not remembered": 88,
    "a roll-back below it is not noticed": 206,
    "compactions add rows": 140,
    "compactions are not told apart": 21,
    "what was added and removed does not cancel": 112,
    "deletes of compacted files are forgotten": 850,
    "deletes that are repeated count twice": 20626,
    "deletes before the position are not looked at": 247,
    "only rows that came have keys": 14,
    "only rows that came have ranges": 0,
    "the floor moves whatever is pending": 4,
    "another partition definition is not noticed": 119,
    "new partitions count as consumed": 427,
    "what the own table holds of new partitions is not looked for": 20,
    "days that depend on a row of the day before are forgotten": 74,
    "results that were rolled back count": 38,
    "entries that count for nothing stay": 59,
    "new partitions are not looked for": 0,
    "a lost floor never moves again": 8,
    "runs of one consumer look alike": 235,
    "appending runs do not meet": 963,
    "results of an earlier day are forgotten": 40,
    "later days do not follow": 4,
}
"""The seed of a history that shows each of them. Where it does not any more, those after it are searched."""


@contextmanager
def _bug(name: str) -> Iterator[None]:
    found = _BUGS[name]
    with ExitStack() as stack:
        for wrong in found if isinstance(found[0], tuple) else (found,):
            stack.enter_context(patch.object(*wrong))
        yield


@pytest.mark.parametrize("name", _BUGS)
def test_it_finds_the_bug(name: str) -> None:
    wanted = _FOUND_AS.get(name, "and a full computation gives")
    with _bug(name):
        found = failures(range(_SHOWS_AT[name], _SHOWS_AT[name] + _WITHIN))
        why = (played.failure or "" for played in found)
        assert any(wanted in text.rsplit("\n", 1)[-1] for text in why), f"{_WITHIN} histories did not notice"


# -- a schedule that chance rarely finds ---------------------------------------------------------------


def test_an_old_run_meets_one_whose_entry_the_common_position_covers() -> None:
    writer = Writer(Random(0))
    lake = Lake(writer)
    kind = Kind("copy", "rows", ("one",), "fail", PARTS)
    instance: Any = Partitions(["p0", "p1"])

    def run(name: str, *partitions: str) -> Run:
        found = Run(lake, name, len(lake.states) - 1)
        step = Step.of(kind, found, partitions=partitions, instance=instance)
        step.write(writer.create(by_part=False))
        return found

    def rows(*parts: str) -> list[Row]:
        return [Row(part, None, "a", 1) for part in parts]

    with model_files():
        lake.put({"one": writer.append(writer.create(by_part=True), rows("p0", "p1"))})
        run("r1", "p0", "p1").publish()
        lake.put({"one": writer.append(lake.main["one"], rows("p1"))})
        run("r2", "p1").publish()
        lake.put({"one": writer.append(lake.main["one"], rows("p0", "p1"))})
        old = run("r3", "p0")
        run("r4", "p0").publish()
        run("r5", "p1").publish()
        with pytest.raises(Refused):
            old.publish()
