"""What must hold of a schedule that has come to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from branchlake_dagster.branching.run_branch import branch_name
from branchlake_dagster.branching.run_tags import JUDGED_HEAD_TAG, PUBLICATION_TAG
from branchlake_dagster.lakehouse.nessie import NessieClient
from branchlake_dagster.lakehouse.nessie.model import IcebergTable, LogEntry
from branchlake_dagster.publication.ledger import Publication, publications_in
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.runs import CHANGE, Plan, table_key
from branchlake_dagster_tests.simulation.tables import Row
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.simulation.world import TABLES, World

Rows = dict[str, list[Row]]


class Violated(AssertionError):  # noqa: N818 - reads as a verdict
    """An invariant does not hold."""


def must(condition: bool, text: str) -> None:
    if not condition:
        raise Violated(text)


def check(world: World) -> None:
    """Raise Violated with the first thing that is wrong."""
    look = _Look(world)
    look.every_state_of_main()
    look.every_run()
    look.nothing_left()


class _Look:
    def __init__(self, world: World) -> None:
        self._world = world
        self._client = NessieClient("", transport=DirectTransport(world.server))
        self._log = [*self._client.log("main")][::-1]
        self._done: dict[str, tuple[int, Publication]] = {}
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
            found = publications_in(entry)
            must(
                number == 0 or bool(found),
                f"main has a commit that is no publication: {entry.commit.message}",
            )
            for one in found:
                self._included(number, one, rows)
            for name in TABLES:
                seen, wanted = self._visible(entry, name), sorted(rows[name])
                must(seen == wanted, f"table {name} at {entry.commit.message!r}: {_difference(seen, wanted)}")

    def _included(self, number: int, one: Publication, rows: Rows) -> None:
        must(one.run_id not in self._done, f"run {one.run_id} is in the ledger twice")
        plan = self._world.plans[one.run_id]
        must(plan.passes, f"run {one.run_id} was published although its checks failed")
        self._done[one.run_id] = number, one
        for name in plan.reads or ():
            seen, now = sorted(plan.seen[name]), sorted(rows[name])
            must(seen == now, f"run {one.run_id} read {name} as it no longer was: {_difference(now, seen)}")
        for change in self._written(one.run_id):
            rows[change.table] = change.on_rows(rows[change.table])

    def _written(self, run_id: str) -> list[Change]:
        """The changes on a run's branch up to the hash that was judged, in order."""
        tags = self._world.instance.look(run_id).tags
        found = []
        for commit in self._world.server.history.first_parents(tags[JUDGED_HEAD_TAG]):
            if CHANGE not in commit.properties:
                break
            found.append(self._changes[commit.properties[CHANGE]])
        return found[::-1]

    def _visible(self, entry: LogEntry, name: str) -> list[Row]:
        key = table_key(name)
        content = self._client.contents(f"@{entry.commit.hash}", [key]).get(key)
        if not isinstance(content, IcebergTable):
            return []
        warehouse = self._world.warehouse
        return sorted(warehouse.rows_of(warehouse.state(content)))

    # -- runs ------------------------------------------------------------------------------------------

    def every_run(self) -> None:
        """What Dagster was told of a run is what `main` shows."""
        for plan in self._world.plans.values():
            run = self._world.instance.look(plan.run_id)
            told = run.tags.get(PUBLICATION_TAG)
            done = self._done.get(plan.run_id)
            hash_ = done[1].hash if done else None
            must(told == hash_, f"run {plan.run_id} is told to be published as {told}, and main has {hash_}")
            # One that publishes itself may die between that and its end.
            fine = run.is_success or plan.publishes_itself
            must(done is None or fine, f"run {plan.run_id} is published and ended as {run.status.value}")
            if done is None and run.is_success and plan.passes and self._any(plan):
                self._rightly_refused(plan, run.tags)
            must(not plan.fenced, f"run {plan.run_id} was fenced while it was at work")

    def _any(self, plan: Plan) -> bool:
        """Whether the run wrote anything."""
        return JUDGED_HEAD_TAG in self._world.instance.look(plan.run_id).tags and bool(
            self._written(plan.run_id)
        )

    def _rightly_refused(self, plan: Plan, tags: Mapping[str, str]) -> None:
        """Somebody else published into what this run changed or read, and not only appends met appends."""
        mine = self._written(plan.run_id)
        base = tags["branchlake/base_hash"]
        since = next(i for i, entry in enumerate(self._log) if entry.commit.hash == base)
        others = [
            change
            for number, one in self._done.values()
            if number > since
            for change in self._written(one.run_id)
        ]
        must(bool(others), f"run {plan.run_id} was refused and nobody else published anything")
        if plan.reads is not None:
            return
        collides = any(_collide(one, other) for one in mine for other in others)
        reason = tags.get("branchlake/reason")
        must(collides, f"run {plan.run_id} was refused without need ({reason}): {mine} against {others}")

    # -- clean-up --------------------------------------------------------------------------------------

    def nothing_left(self) -> None:
        """No branch of a run is left, all of them being settled."""
        left = sorted(
            name for name, at in self._world.server.history.references.items() if at.type == "BRANCH"
        )
        must(left == ["main"], f"branches are left: {left}")
        for plan in self._world.plans.values():
            must(branch_name(plan.run_id) not in left, f"the branch of {plan.run_id} is left")


def _collide(mine: Change, other: Change) -> bool:
    if mine.table != other.table or mine.kind is Kind.APPEND:
        return False
    if Kind.REPLACE_TABLE in (mine.kind, other.kind):
        return True
    return mine.part == other.part


def _difference(seen: list[Row], wanted: list[Row]) -> str:
    extra, missing = list(seen), list(wanted)
    for row in seen:
        if row in missing:
            missing.remove(row)
            extra.remove(row)
    return f"too many {extra}, missing {missing}"


def failures(seeds: range) -> Iterator[tuple[int, str]]:
    """The seeds whose schedules violate an invariant, with their stories."""
    for seed in seeds:
        world = World(seed)
        try:
            world.play()
            check(world)
        except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
            yield seed, f"{world.story()}\n{type(error).__name__}: {error}"
