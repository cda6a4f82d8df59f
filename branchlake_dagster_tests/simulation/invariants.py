"""What must hold of a schedule that has come to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.publication.ledger import Publication, parse_publications
from branchlake_dagster.runs.discarding import FAILING_STATUSES
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.runs import TABLES, Plan, table_key, unchecked_tables
from branchlake_dagster_tests.simulation.tables import Row
from branchlake_dagster_tests.simulation.world import World
from branchlake_dagster_tests.simulation.writer import CHANGE

Rows = dict[str, list[Row]]


class Violated(AssertionError):  # noqa: N818 - reads as a verdict
    """An invariant does not hold."""


def must(condition: object, text: str) -> None:
    """Raise Violated with `text` unless `condition` holds."""
    if not condition:
        raise Violated(text)


def check(world: World) -> None:
    """Raise Violated with the first thing that is wrong."""
    look = _Look(world)
    must(not world.wrongly_swept, f"a sweep deleted {world.wrongly_swept}: its run was not discarded")
    look.every_state_of_main()
    for plan in world.plans.values():
        touched = plan.run_id in world.stranger.touched
        must(touched or not plan.fenced, f"run {plan.run_id} was at work and was fenced {plan.fenced}")
        if not plan.foreign and world.at(plan.run_id).knows(plan.run_id):
            look.run(plan)
    foreign = [plan for plan in world.plans.values() if plan.foreign]
    theirs = {run_branch_name(plan.run_id) for plan in foreign}
    left = set(world.server.history.references)
    for plan in foreign:
        kept = run_branch_name(plan.run_id) in left or plan.forgotten or not plan.written
        kept = kept or plan.run_id in world.stranger.touched
        must(kept, f"run {plan.run_id} of another Dagster instance lost its branch")
    if world.hands.undone:
        # Whose files main still needs cannot be told then, so what was discarded is kept, and reported.
        left = {
            name
            for name in left
            if not name.startswith((ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING))
        }
    # What a run that had not recorded its base wrote, and what a stranger added to it, are the same to a sweep.
    left -= {f"{ReferencePrefix.SWEEPING}{run_id}" for run_id in world.stranger.touched}
    must(left <= {"main", *theirs}, f"references are left: {sorted(left)}")


class _Look:
    def __init__(self, world: World) -> None:
        self._world = world
        self._client = world.direct()
        self._log = [*self._client.log("main")][::-1]
        self._done: dict[str, tuple[int, Publication]] = {}
        self._brought: dict[str, set[str]] = {}
        """The changes of each run that are on main, by publication or by hand."""
        self._changes = {
            change.id: change
            for plan in world.plans.values()
            for change in (*plan.changes, *([plan.late] if plan.late else []))
        }

    # -- main ------------------------------------------------------------------------------------------

    def every_state_of_main(self) -> None:
        """Each commit on `main` shows exactly the rows that its publications, one after the other, give."""
        rows: Rows = {name: [] for name in TABLES}
        for number, entry in enumerate(self._log):
            found = parse_publications(entry)
            by_hand = self._world.hands.merged.get(entry.commit.hash)
            if by_hand:
                self._merged_by_hand(number, entry.commit.hash, *by_hand, rows)
            elif not found:
                # There is a first commit, and one with the tables that were there before.
                must(number < 2, f"main has a commit that is no publication: {entry.commit.message}")
                if number == 1:
                    rows |= {name: list(there) for name, there in self._world.initial.items()}
            unchecked = [then for one in found for then in self._include(number, one, rows)]
            for run_id, name, then in unchecked:
                self._must_be_checked(run_id, name, then, sorted(rows[name]))
            for name in TABLES:
                seen, wanted = self._visible(entry.commit.hash, name), sorted(rows[name])
                must(seen == wanted, f"table {name} at {entry.commit.message!r}: {_difference(seen, wanted)}")
                must(
                    len(seen) == len(set(seen)),
                    f"table {name} at {entry.commit.message!r} has a row twice: {seen}",
                )

    def _merged_by_hand(self, number: int, hash_: str, run_id: str, head: str, rows: Rows) -> None:
        """Change `rows` as a branch does that somebody has merged: nobody asked the gate."""
        brought = self._brought.setdefault(run_id, set())
        merged = number, Publication(run_branch_name(run_id), run_id, run_id, "", "", (), hash_)
        self._done.setdefault(run_id, merged)  # else it brings what a zombie has added to what was published
        for change in self._changes_up_to(head):
            if change.id not in brought:
                rows[change.table] = change.on_rows(rows[change.table])
                brought.add(change.id)

    def _include(self, number: int, one: Publication, rows: Rows) -> Iterator[tuple[str, str, list[Row]]]:
        """Change `rows` as the publication does; the (run, table, its rows then) that a check must have seen."""
        run_id, plans = one.run_id, self._lineage(one.run_id)
        before = self._done.get(run_id)
        # What a zombie added to a branch that was merged by hand comes with Nessie's next merge of it.
        brought = self._brought.setdefault(run_id, set())
        must(before is None or not before[1].verdict, f"run {run_id} is in the ledger twice")
        must(all(plan.passes for plan in plans), f"run {run_id} was published although its checks failed")
        unchecked = unchecked_tables(plans) & {change.table for change in self._written(run_id)}
        must(not unchecked, f"run {run_id} was published with rows in {unchecked} that no check saw")
        self._done[run_id] = number, one
        left_out = set(plans[-1].written) - {change.id for change in self._written(run_id)}
        late = plans[-1].late.id if plans[-1].late else None
        must(left_out <= {late}, f"run {run_id} was published without {sorted(left_out)}")
        for plan in plans:
            for name, rows_then in plan.seen.items():
                seen, now = sorted(rows_then), sorted(rows[name])
                must(seen == now, f"run {run_id} read {name} as it no longer was: {_difference(now, seen)}")
        for change in self._written(run_id):
            if change.id not in brought:
                rows[change.table] = change.on_rows(rows[change.table])
                brought.add(change.id)
        if any(plan.whole for plan in plans):
            for name in {change.table for change in self._written(run_id)}:
                yield run_id, name, sorted(rows[name])

    def _must_be_checked(self, run_id: str, name: str, rows: list[Row], shown: list[Row]) -> None:
        """A check on the whole table passed on exactly these rows: on the branch, or on the rebased state.

        `shown` are those that the commit shows, when it carries more than this run.
        """
        known = {
            tuple(found)
            for owner, table, found in self._world.checks.approved
            if (owner, table) == (run_id, f"lake.{name}")
        }
        # The branch's own metadata may be swept by now; what it said then is what was checked.
        known.add(tuple(self._visible(self._head(run_id) or "", name, readable=False)))
        must(
            {tuple(rows), tuple(shown)} & known,
            f"run {run_id} was published with rows in {name} that no check has seen: {rows}",
        )

    def _visible(self, at: str, name: str, *, readable: bool = True) -> list[Row]:
        """The rows of a table; with `readable`, raise FilesMissing when one could not read them."""
        key = table_key(name)
        content = self._client.contents(f"@{at}", [key]).get(key)
        if not isinstance(content, IcebergTable):
            return []
        warehouse = self._world.warehouse
        state = warehouse.state(content) if readable else warehouse.locations[content.metadata_location]
        return sorted(warehouse.rows_of(state))

    # -- runs ------------------------------------------------------------------------------------------

    def _ancestry(self, run_id: str) -> list[Plan]:
        """A run and those it retries, the oldest first."""
        plan = self._world.plans[run_id]
        found = [plan]
        while plan.parent and plan.retries:
            plan = self._world.plans[plan.parent]
            found.insert(0, plan)
        return found

    def _lineage(self, run_id: str) -> list[Plan]:
        """A run and those whose work is on its branch."""
        taken = {change.id for change in self._written(run_id)}
        return [
            plan
            for plan in self._ancestry(run_id)
            if plan.run_id == run_id or taken & {change.id for change in plan.changes}
        ]

    def _head(self, run_id: str) -> str | None:
        """The hash of the run's branch that was to be published."""
        heads = self._world.plans[run_id].heads
        must(len(heads) < 2, f"run {run_id} was to be published in {len(heads)} states")
        return next(iter(heads), None)

    def _written(self, run_id: str) -> list[Change]:
        """The changes on a run's branch up to the hash that was judged or merged by hand, in order."""
        taken = [head for run, head in self._world.hands.merged.values() if run == run_id]
        return self._changes_up_to(self._head(run_id) or next(iter(taken), None))

    def _changes_up_to(self, head: str | None) -> list[Change]:
        found = []
        for commit in self._world.server.history.first_parents(head) if head else ():
            if CHANGE not in commit.properties:
                break
            found.append(self._changes[commit.properties[CHANGE]])
        return found[::-1]

    def run(self, plan: Plan) -> None:
        """What Dagster was told of a run is what `main` shows."""
        run = self._world.at(plan.run_id).look(plan.run_id)
        told = run.tags.get(RunTag.PUBLICATION)
        done = self._done.get(plan.run_id)
        hash_ = done[1].hash if done else None
        told = None if told == "none" or run.tags.get(RunTag.OPENED_BY) != plan.run_id else told
        hands = self._world.hands
        status = run.tags.get(RunTag.STATUS) if run.tags.get(RunTag.OPENED_BY) == plan.run_id else None
        must(status != RunState.PENDING or not run.is_finished, f"run {plan.run_id} is pending for ever")
        if told in hands.undone and run_branch_name(plan.run_id) in self._world.stranger.restored_branches:
            must(
                done or status != RunState.PUBLISHED, f"run {plan.run_id} is published and main lost its rows"
            )
        if told in hands.undone:
            return  # it was on main when it was told; it may have come back by hand
        if hash_ in hands.merged and told in {entry.commit.hash for entry in self._log}:
            return  # merged more than once, or with what a zombie added: main has it there all the same
        if told is None and done and hands.undone:
            return  # refused for what was then set back, while another publisher still had it in hand
        if told is None and hash_ in hands.merged:
            return  # merged by hand although it was blocked, or refused in a race with that
        must(told == hash_, f"run {plan.run_id} is told to be published as {told}, and main has {hash_}")
        # One that publishes itself may die between that and its end.
        # One that was refused, and then published by another publisher because main was set back, has failed.
        # One whose branch was gone for a while, before Nessie was restored, has failed too.
        touched = plan.run_id in self._world.stranger.touched
        fine = run.is_success or plan.publishes_itself or bool(hands.undone) or touched
        must(done is None or fine, f"run {plan.run_id} is published and ended as {run.status.value}")
        ancestry = self._ancestry(plan.run_id)
        passes = all(one.passes for one in ancestry) and not unchecked_tables(ancestry)
        late = plan.late.id if plan.late else None
        must(
            status not in FAILING_STATUSES or not run.is_success,
            f"run {plan.run_id} is {status} and looks green",
        )
        unpublished = run.is_success or status == RunState.REFUSED
        if done is None and unpublished and passes and set(plan.written) - {late}:
            self._rightly_refused(plan, run.tags)

    def _rightly_refused(self, plan: Plan, tags: Mapping[str, str]) -> None:
        """Somebody else published into what this run changed or read, and not only appends met appends."""
        if plan.run_id in self._world.checks.refused or self._world.hands.undone:
            return  # what it collided with may have been taken back
        if self._world.stranger.touched & {one.run_id for one in self._ancestry(plan.run_id)}:
            return  # somebody else changed its branch
        late = {one.late.id for one in self._ancestry(plan.run_id) if one.late}
        if late & {commit.properties.get(CHANGE) for commit in self._world.server.history.commits.values()}:
            return  # a commit may have come after the run's end, which no check saw
        mine = self._written(plan.run_id)
        since = [entry.commit.hash for entry in self._log].index(tags[RunTag.BASE_HASH])
        others = [
            change
            for number, one in self._done.values()
            if number > since
            for change in (self._changes[id_] for id_ in self._brought[one.run_id])
        ]
        plans = self._ancestry(plan.run_id)
        reads = {name for one in plans for name in one.reads or ()}
        strict = any(one.reads is not None for one in plans)
        touched = reads | {change.table for change in mine} if strict else set()
        collides = any(
            other.table in touched or any(_collide(one, other) for one in mine) for other in others
        )
        reason = tags.get(RunTag.REASON)
        told = ", ".join(map(str, mine)), ", ".join(map(str, others))
        must(collides, f"run {plan.run_id} was refused without need ({reason}): {told[0]} against {told[1]}")


def _collide(mine: Change, other: Change) -> bool:
    if mine.table != other.table or mine.kind is Kind.APPEND:
        return False
    if Kind.REPLACE_TABLE in (mine.kind, other.kind) or mine.kind in (Kind.ROW_DELETE, Kind.DESCRIBE):
        return True
    return mine.part == other.part


def _difference(seen: list[Row], wanted: list[Row]) -> str:
    extra, missing = list(seen), list(wanted)
    for row in seen:
        if row in missing:
            missing.remove(row)
            extra.remove(row)
    return f"too many {extra}, missing {missing}"
