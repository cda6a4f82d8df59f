"""Retries on real Iceberg tables: from failure, of chosen steps, of a step within its run."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster.internals.dagster import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG, ROOT_RUN_ID_TAG
from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
from branchlake_dagster.io_manager.table_writer import TableWriter
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.discarding import claim_branch, discard_branch, discarded_tag_name
from branchlake_dagster.runs.provenance import find_running_step
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import NO_VALUE, RunState
from branchlake_dagster.stored_names import LakeProperty, RunTag
from branchlake_dagster.tables.errors import RetryNeedsFullRun
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project, re_execute_all, retry, retry_failed_assets
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
APPEND = table_metadata(write_mode="append", require_checks=False)


class Flaky:
    """Two assets of which the second fails as long as `broken`."""

    def __init__(self, namespace: str) -> None:
        self.broken = True
        self.first_runs = 0

        @dg.asset(key=[namespace, "first"], metadata=FREE)
        def first() -> pl.DataFrame:
            self.first_runs += 1
            return pl.DataFrame({"n": [self.first_runs]})

        @dg.asset(key=[namespace, "second"], ins={"first": dg.AssetIn([namespace, "first"])}, metadata=FREE)
        def second(first: pl.DataFrame) -> pl.DataFrame:
            if self.broken:
                raise RuntimeError("not yet")
            return first.with_columns(twice=pl.col("n") * 2)

        self.assets = (first, second)


@pytest.fixture
def flaky(namespace: str) -> Flaky:
    return Flaky(namespace)


@pytest.fixture
def p(lakehouse: Lakehouse, flaky: Flaky) -> Iterator[Project]:
    with project(lakehouse, *flaky.assets) as found:
        yield found


def tags(p: Project, run_id: str) -> dict[str, str]:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return dict(run.tags)


@pytest.mark.parametrize("discarded", [False, True])
def test_a_retry_from_failure_sees_what_its_parent_wrote(
    lakehouse: Lakehouse, namespace: str, p: Project, flaky: Flaky, discarded: bool
) -> None:
    parent = p.run(ok=False)
    base = tags(p, parent)[RunTag.BASE_HASH]
    head = lakehouse.nessie.reference(run_branch_name(parent), fetch_metadata=True)
    if discarded:
        discard_branch(lakehouse.nessie, head)
    flaky.broken = False
    child = retry(p, parent)
    assert flaky.first_runs == 1
    assert p.rows(namespace, "second", ref=run_branch_name(child)) == [{"n": 1, "twice": 2}]
    mine = tags(p, child)
    assert mine[RunTag.BRANCH] == run_branch_name(child)
    assert mine[RunTag.OPENED_BY] == child
    assert mine[RunTag.CONTINUES] == run_branch_name(parent)
    assert (mine[RunTag.BASE_HASH], mine[RunTag.VERDICT]) == (base, "pending")
    # The parent's own name is gone: what is left of the parent cannot write any more.
    assert {run_branch_name(parent), discarded_tag_name(run_branch_name(parent))}.isdisjoint(p.branches())


def test_a_retry_of_a_retry_goes_on(namespace: str, p: Project, flaky: Flaky) -> None:
    parent = p.run(ok=False)
    first = retry(p, parent, ok=False)
    flaky.broken = False
    second = retry(p, first)
    assert tags(p, second)[RunTag.CONTINUES] == run_branch_name(first)
    assert p.rows(namespace, "second", ref=run_branch_name(second)) == [{"n": 1, "twice": 2}]
    # The first parent's work is with the second retry now.
    retry(p, parent, ok=False)
    p.failed_with(RetryNeedsFullRun, first)


def test_a_retry_of_a_published_run_is_refused(namespace: str, p: Project, flaky: Flaky) -> None:
    flaky.broken = False
    parent = p.run()
    p.settle(parent)
    child = retry(p, parent, f"{namespace}__second", ok=False)
    p.failed_with(RetryNeedsFullRun, "was published as", "Re-execute all steps")
    # Dagster copies the parent's tags, but the retry is not published.
    assert (tags(p, child)[RunTag.STATUS], tags(p, parent)[RunTag.STATUS]) == (NO_VALUE, RunState.PUBLISHED)


def test_a_retry_whose_parents_state_is_gone_is_refused(
    lakehouse: Lakehouse, p: Project, flaky: Flaky
) -> None:
    parent = p.run(ok=False)
    branch = lakehouse.nessie.reference(run_branch_name(parent))
    lakehouse.nessie.delete_branch(branch.name, expected_hash=branch.hash)
    flaky.broken = False
    retry(p, parent, ok=False)
    p.failed_with(RetryNeedsFullRun, "is gone", "Re-execute all steps")


def test_two_retries_do_not_share_a_branch(p: Project, flaky: Flaky) -> None:
    parent = p.run(ok=False)
    flaky.broken = False
    run = p.instance.get_run_by_id(parent)
    assert run is not None
    older = dg.DagsterRun(
        job_name=run.job_name,
        run_id=str(uuid.uuid4()),
        tags={PARENT_RUN_ID_TAG: parent, ROOT_RUN_ID_TAG: parent},
        parent_run_id=parent,
        root_run_id=parent,
        step_keys_to_execute=["x"],
        status=dg.DagsterRunStatus.STARTED,
    )
    p.instance.add_run(older)
    retry(p, parent, ok=False)
    p.failed_with(RetryNeedsFullRun, older.run_id)


def test_the_parents_work_is_continued_once(
    lakehouse: Lakehouse, namespace: str, p: Project, flaky: Flaky
) -> None:
    """A clean-up that overlapped with the first retry left the parent's tag, as did one that died."""
    parent = p.run(ok=False)
    head = lakehouse.nessie.reference(run_branch_name(parent)).hash
    flaky.broken = False
    first = retry(p, parent)
    tag = discarded_tag_name(run_branch_name(parent))
    lakehouse.nessie.create_tag(tag, from_ref="main", from_hash=head)
    second = retry(p, parent, ok=False)
    p.failed_with(RetryNeedsFullRun, first)
    assert run_branch_name(second) not in p.branches()
    assert p.rows(namespace, "second", ref=run_branch_name(first)) == [{"n": 1, "twice": 2}]
    # A retry of that one has its tags, as Dagster copies them, and may go on.
    third = retry(p, first, f"{namespace}__second", ok=False)
    p.failed_with(RetryNeedsFullRun, "waits for its verdict")
    assert run_branch_name(third) not in p.branches()


@pytest.mark.parametrize("passed", [True, False])
def test_what_a_publisher_may_have_begun_with_is_not_continued(
    lakehouse: Lakehouse, namespace: str, p: Project, flaky: Flaky, passed: bool
) -> None:
    flaky.broken = not passed
    parent = p.run(ok=passed)
    branch = lakehouse.nessie.reference(run_branch_name(parent))
    if not passed:
        # It published itself, and died before it could tell.
        claim_branch(lakehouse.nessie, branch)
    retry(p, parent, f"{namespace}__second", ok=False)
    p.failed_with(RetryNeedsFullRun, "waits for its verdict", "Retry when the parent has a verdict")
    assert lakehouse.nessie.reference(branch.name).hash == branch.hash


def test_a_full_re_execution_starts_fresh(lakehouse: Lakehouse, p: Project, flaky: Flaky) -> None:
    parent = p.run(ok=False)
    flaky.broken = False
    again = p.run(tags=tags(p, parent))
    assert flaky.first_runs == 2
    assert tags(p, again)[RunTag.BRANCH] == run_branch_name(again)
    assert tags(p, again)[RunTag.BASE_HASH] == lakehouse.nessie.reference("main").hash
    assert run_branch_name(parent) in p.branches()


def test_a_full_re_execution_of_a_retry_of_single_assets_starts_fresh(
    lakehouse: Lakehouse, p: Project, flaky: Flaky
) -> None:
    parent = p.run(ok=False)
    flaky.broken = False
    child = retry_failed_assets(p, parent)
    assert tags(p, child)[RunTag.CONTINUES] == run_branch_name(parent)
    p.settle(child)
    whole = re_execute_all(p, child)
    mine = tags(p, whole)
    assert mine[ASSET_RESUME_RETRY_TAG] == "true"  # copied by Dagster
    assert mine[RunTag.BRANCH] == run_branch_name(whole)
    assert mine[RunTag.BASE_HASH] == lakehouse.nessie.reference("main").hash


def test_a_retry_of_single_assets_that_failed_again_goes_on(namespace: str, p: Project, flaky: Flaky) -> None:
    parent = p.run(ok=False)
    again = retry_failed_assets(p, parent, ok=False)
    flaky.broken = False
    child = retry_failed_assets(p, again)
    assert tags(p, child)[RunTag.CONTINUES] == run_branch_name(again)
    assert p.rows(namespace, "second", ref=run_branch_name(child)) == [{"n": 1, "twice": 2}]


def test_a_retry_of_single_assets_holds_the_leases_of_finished_ones(
    lakehouse: Lakehouse, namespace: str
) -> None:
    fails = [True]

    @dg.asset(key=[namespace, "first"], metadata=FREE | table_metadata(exclusive=namespace))
    def first() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "second"], deps=[first], metadata=FREE)
    def second() -> pl.DataFrame:
        if fails[0]:
            raise RuntimeError("not yet")
        return pl.DataFrame({"n": [2]})

    with project(lakehouse, first, second) as p:
        again = retry_failed_assets(p, p.run(ok=False), ok=False)
        fails[0] = False
        assert p.settle(retry_failed_assets(p, again)).state is RunState.PUBLISHED
        assert p.rows(namespace, "first") == [{"n": 1}]


def test_a_retry_of_a_run_that_used_no_table_starts_fresh(lakehouse: Lakehouse, namespace: str) -> None:
    broken = [True]

    @dg.asset(key=[namespace, "only"], metadata=FREE)
    def only() -> pl.DataFrame:
        if broken:
            raise RuntimeError("not yet")
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, only) as p:
        parent = p.run(ok=False)
        assert run_branch_name(parent) not in p.branches()
        broken.clear()
        child = retry(p, parent)
        assert tags(p, child)[RunTag.BRANCH] == run_branch_name(child)
        assert RunTag.CONTINUES not in tags(p, child)
        assert p.rows(namespace, "only", ref=run_branch_name(child)) == [{"n": 1}]


def test_a_retry_whose_steps_use_no_table_takes_the_work_over_all_the_same(
    lakehouse: Lakehouse, namespace: str
) -> None:
    broken = [True]

    @dg.asset(key=[namespace, "first"], metadata=FREE)
    def first() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "tell"], deps=[first])
    def tell(context: dg.AssetExecutionContext) -> None:
        if broken:
            raise RuntimeError("not yet")

    with project(lakehouse, first, tell) as p:
        parent = p.run(ok=False)
        broken.clear()
        child = retry(p, parent)
        assert p.rows(namespace, "first", ref=run_branch_name(child)) == [{"n": 1}]


def test_a_retry_without_tables_of_a_run_without_tables_gets_no_branch(
    lakehouse: Lakehouse, namespace: str
) -> None:
    broken = [True]

    @dg.asset(key=[namespace, "tell"])
    def tell() -> None:
        if broken:
            raise RuntimeError("not yet")

    with project(lakehouse, tell) as p:
        parent = p.run(ok=False)
        broken.clear()
        child = retry(p, parent)
        assert RunTag.BRANCH not in tags(p, child)
        assert run_branch_name(child) not in p.branches()


# -- a step that is attempted again --------------------------------------------------------------------


def appending(namespace: str, fail: Callable[[int], bool], **options: Any) -> dg.AssetsDefinition:
    """Appends one row that names its attempt, and then fails as long as `fail(attempt)`."""
    attempts = []

    @dg.asset(key=[namespace, "t"], metadata=APPEND, **options)
    def t() -> Iterator[dg.Output[pa.Table]]:
        attempts.append(1)
        yield dg.Output(pa.table({"n": [len(attempts)]}))
        if fail(len(attempts)):
            raise RuntimeError("after the write")

    return t


def history(lake: Lakehouse, namespace: str, branch: str) -> list[dict[str, str]]:
    """The summaries of the snapshots that led to the present one, newest first."""
    table = lake.catalog(branch).load_table((namespace, "t"))
    found, snapshot = [], table.current_snapshot()
    while snapshot is not None:
        found.append(dict(snapshot.summary.additional_properties))
        snapshot = table.snapshot_by_id(snapshot.parent_snapshot_id or 0)
    return found


def test_a_step_that_fails_after_its_append_does_not_double_its_rows(
    lakehouse: Lakehouse, namespace: str
) -> None:
    t = appending(namespace, lambda attempt: attempt in (1, 2, 4), retry_policy=dg.RetryPolicy(max_retries=2))
    with project(lakehouse, t) as p:
        first = p.run()
        assert p.rows(namespace, "t", ref=run_branch_name(first)) == [{"n": 3}]
        # What was undone is not in the table's history either.
        assert [
            told["branchlake.attempt"] for told in history(lakehouse, namespace, run_branch_name(first))
        ] == ["3"]
        p.settle(first)
        second = p.run()
        assert sorted(row["n"] for row in p.rows(namespace, "t", ref=run_branch_name(second))) == [3, 5]


def test_a_retry_from_failure_does_not_double_the_rows_of_its_parent(
    lakehouse: Lakehouse, namespace: str
) -> None:
    with project(lakehouse, appending(namespace, lambda attempt: attempt == 1)) as p:
        parent = p.run(ok=False)
        assert p.rows(namespace, "t", ref=run_branch_name(parent)) == [{"n": 1}]
        child = retry(p, parent)
        assert p.rows(namespace, "t", ref=run_branch_name(child)) == [{"n": 2}]


def test_a_retry_of_single_assets_does_not_double_the_rows_of_a_step_with_another_key(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """Dagster splits a step if another asset lies between its assets. A retry of the last one is not split."""
    middle_key = dg.AssetKey([namespace, "middle"])
    steps: list[str] = []

    @dg.multi_asset(
        outs={
            name: dg.AssetOut([namespace], metadata=APPEND, is_required=False, dagster_type=pl.DataFrame)
            for name in ("first", "last")
        },
        deps=[middle_key],
        internal_asset_deps={"first": set(), "last": {middle_key}},
        can_subset=True,
    )
    def ends(context: dg.AssetExecutionContext) -> Iterator[dg.Output[pl.DataFrame]]:
        (key,) = context.selected_asset_keys
        steps.append(find_running_step().key or "")
        yield dg.Output(pl.DataFrame({"n": [len(steps)]}), output_name=key.path[-1])

    @dg.asset(key=middle_key, deps=[[namespace, "first"]], metadata=FREE)
    def middle() -> pl.DataFrame:
        return pl.DataFrame({"n": [0]})

    with project(lakehouse, ends, middle) as p:
        with pytest.MonkeyPatch.context() as patch:
            written = NessieBranchIOManager.handle_output

            def fail_after_last(self: Any, context: dg.OutputContext, obj: Any) -> None:
                written(self, context, obj)
                if context.asset_key.path[-1] == "last":
                    raise RuntimeError("after the write")

            patch.setattr(NessieBranchIOManager, "handle_output", fail_after_last)
            parent = p.run(ok=False)
        child = retry_failed_assets(p, parent)
        assert steps == ["ends", "ends_2", "ends"]
        assert p.settle(child).state is RunState.PUBLISHED
        assert (p.rows(namespace, "first"), p.rows(namespace, "last")) == ([{"n": 1}], [{"n": 3}])


class Parts:
    """A graph asset with one dynamic step per part, all of which write its table."""

    def __init__(
        self, namespace: str, metadata: dict[str, Any], policy: dg.RetryPolicy | None = None
    ) -> None:
        self.attempts: list[int] = []
        self.fails_after_write = False
        self.returns_nothing_again = False

        @dg.op(out=dg.DynamicOut())
        def parts() -> Iterator[dg.DynamicOutput[int]]:
            yield from (dg.DynamicOutput(n, f"p{n}") for n in (1, 2, 3))

        @dg.op(retry_policy=policy)
        def frame(n: int) -> Iterator[dg.Output[pl.DataFrame | None]]:
            self.attempts.append(n)
            attempt = self.attempts.count(n)
            rows = pl.DataFrame({"n": [n], "attempt": [attempt]})
            yield dg.Output(None if attempt > 1 and self.returns_nothing_again else rows)
            if n == 2 and attempt == 1 and self.fails_after_write:
                raise RuntimeError("after the write")

        @dg.graph_asset(key=[namespace, "t"], metadata=metadata)
        def t() -> Any:
            return parts().map(frame)

        self.asset = t


UPSERT = table_metadata(write_mode="upsert", keys=["n"], require_checks=False)


@pytest.mark.parametrize("metadata", [APPEND, UPSERT], ids=["append", "upsert"])
def test_dynamic_steps_keep_the_rows_of_each_other(
    lakehouse: Lakehouse, namespace: str, metadata: dict[str, Any]
) -> None:
    with project(lakehouse, Parts(namespace, metadata).asset) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert sorted(row["n"] for row in p.rows(namespace, "t")) == [1, 2, 3]


@pytest.mark.parametrize("again", ["step", "run"])
def test_a_dynamic_step_that_is_repeated_replaces_its_own_rows_only(
    lakehouse: Lakehouse, namespace: str, again: str
) -> None:
    parts = Parts(namespace, APPEND, dg.RetryPolicy(max_retries=1) if again == "step" else None)
    parts.fails_after_write = True
    with project(lakehouse, parts.asset) as p:
        run_id = p.run() if again == "step" else retry(p, p.run(ok=False))
        assert sorted(parts.attempts) == [1, 2, 2, 3]
        assert p.settle(run_id).state is RunState.PUBLISHED
        rows = sorted((row["n"], row["attempt"]) for row in p.rows(namespace, "t"))
        assert rows == [(1, 1), (2, 2), (3, 1)]


def test_the_rows_of_a_dynamic_upsert_cannot_be_undone_under_those_of_a_later_step(
    lakehouse: Lakehouse, namespace: str
) -> None:
    parts = Parts(namespace, UPSERT)
    parts.fails_after_write = True
    with project(lakehouse, parts.asset) as p:
        retry(p, p.run(ok=False), ok=False)
        p.failed_with(RetryNeedsFullRun, f"{namespace}.t")


def test_a_dynamic_step_whose_later_attempt_returns_nothing_removes_its_own_rows_only(
    lakehouse: Lakehouse, namespace: str
) -> None:
    parts = Parts(namespace, APPEND)
    parts.fails_after_write = parts.returns_nothing_again = True
    with project(lakehouse, parts.asset) as p:
        child = retry(p, p.run(ok=False))
        assert sorted(row["n"] for row in p.rows(namespace, "t", ref=run_branch_name(child))) == [1, 3]


def test_an_append_is_undone_under_what_others_wrote_since(lakehouse: Lakehouse, namespace: str) -> None:
    def other_writer(attempt: int) -> bool:
        if attempt == 1:
            (branch,) = [name for name in p.branches() if name.startswith("run-") and name not in before]
            lakehouse.catalog(branch).load_table((namespace, "t")).append(pa.table({"n": [100]}))
        return attempt == 1

    t = appending(namespace, other_writer, retry_policy=dg.RetryPolicy(max_retries=1))
    with project(lakehouse, t) as p:
        before = p.branches()
        run_id = p.run()
        assert sorted(row["n"] for row in p.rows(namespace, "t", ref=run_branch_name(run_id))) == [2, 100]
        told = history(lakehouse, namespace, run_branch_name(run_id))
        assert [LakeProperty.UNDOES in summary for summary in told] == [False, True, False, False]


def test_rows_that_others_rewrote_since_cannot_be_undone(lakehouse: Lakehouse, namespace: str) -> None:
    def rewriter(attempt: int) -> bool:
        (branch,) = [name for name in p.branches() if name.startswith("run-") and name not in before]
        lakehouse.catalog(branch).load_table((namespace, "t")).overwrite(pa.table({"n": [7]}))
        return True

    t = appending(namespace, rewriter, retry_policy=dg.RetryPolicy(max_retries=1))
    with project(lakehouse, t) as p:
        before = p.branches()
        p.run(ok=False)
        (failure,) = [e for e in p.last.all_events if e.is_step_failure]
        error = failure.step_failure_data.error
        while error and error.cls_name != RetryNeedsFullRun.__name__:  # inside of Dagster's own
            error = error.cause
        assert error
        assert f"{namespace}.t" in error.message


def test_a_commit_that_arrives_after_all_is_taken_out(lakehouse: Lakehouse, namespace: str) -> None:
    """The reply was lost, nothing was there yet when the second attempt looked; then it came."""
    from branchlake_dagster.tables import arrow_frames

    real = arrow_frames.write_frame
    lost: list[Any] = []

    def losing(frame: pa.Table, table: Any, spec: Any, selection: Any, properties: Any) -> None:
        if not lost:
            lost.append((frame, spec, selection, properties))
            raise RuntimeError("reply lost")
        late_frame, late_spec, late_selection, late_properties = lost[0]
        real(late_frame, table.catalog.load_table(table.name()), late_spec, late_selection, late_properties)
        real(frame, table.refresh(), spec, selection, properties)

    lakehouse.catalog().create_namespace(namespace)
    lakehouse.catalog().create_table((namespace, "t"), pa.schema([("n", pa.int64())]))
    t = appending(namespace, lambda _: False, retry_policy=dg.RetryPolicy(max_retries=1))
    with project(lakehouse, t) as p, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_frames, "write_frame", losing)
        run_id = p.run()
        assert p.rows(namespace, "t", ref=run_branch_name(run_id)) == [{"n": 2}]


def read_once(frame: pa.Table) -> pl.LazyFrame:
    """A lazy frame that has rows only the first time that it is collected."""
    heights = iter((1,))
    return pl.DataFrame(pl.from_arrow(frame)).lazy().map_batches(lambda rows: rows.head(next(heights, 0)))


@pytest.mark.parametrize(
    "form", [lambda frame: frame, lambda frame: frame.to_reader(), read_once], ids=["table", "reader", "lazy"]
)
def test_a_creation_that_arrives_after_all_is_taken_out(
    lakehouse: Lakehouse, namespace: str, form: Callable[[pa.Table], Any]
) -> None:
    """The same of a table that the first attempt made: the second meets it when it commits its own."""
    real = TableWriter.create_with_rows
    lost: list[Any] = []

    def losing(writer: Any, *args: Any) -> Any:
        if not lost:
            lost.append((writer, *args))
            raise RuntimeError("reply lost")
        if len(lost) == 1:
            lost.append(real(*lost[0]))
        return real(writer, *args)

    attempts = iter((1, 2))

    @dg.asset(
        key=[namespace, "t"],
        metadata=table_metadata(write_mode="append", require_checks=False),
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    def t() -> Any:
        return form(pa.table({"n": [next(attempts)]}))

    with project(lakehouse, t) as p, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableWriter, "create_with_rows", losing)
        run_id = p.run()
        assert len(lost) == 2
        assert p.rows(namespace, "t", ref=run_branch_name(run_id)) == [{"n": 2}]
