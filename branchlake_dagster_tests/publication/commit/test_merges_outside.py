"""Somebody's hands on Nessie: branches merged or transplanted beside the publisher, `main` rolled back."""

import dagster as dg
import polars as pl
import pytest
import requests

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.publication.workbench import FLAT, Run, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Workbench:
    return Workbench(lakehouse, namespace)


def merge(lake: Lakehouse, branch: str, at: str | None = None) -> str:
    """What the button in Nessie's own UI does; the commit on `main`."""
    head = at or lake.nessie.reference(branch).hash
    done = lake.nessie.merge(
        from_name=branch,
        from_hash=head,
        into=MAIN,
        expected_hash=lake.nessie.reference(MAIN).hash,
        message="by hand",
    )
    assert done.applied, done
    return done.target_hash


def transplant(lake: Lakehouse, run: Run) -> None:
    """Cherry-pick the commits of a branch: `main` keeps no trace of where they are from."""
    hashes = [entry.commit.hash for entry in lake.nessie.log(run.name, since=run.base)][::-1]
    head = lake.nessie.reference(MAIN).hash
    done = requests.post(
        f"{lake.nessie.uri}/trees/{MAIN}@{head}/history/transplant",
        json={"fromRefName": run.name, "hashesToTransplant": hashes, "message": "by hand"},
        timeout=30,
    )
    assert done.ok, done.text


def assign_main(lake: Lakehouse, to: str) -> None:
    head = lake.nessie.reference(MAIN).hash
    done = requests.put(
        f"{lake.nessie.uri}/trees/{MAIN}@{head}",
        params={"type": "BRANCH"},
        json={"type": "DETACHED", "hash": to},
        timeout=30,
    )
    assert done.ok, done.text


# -- merged by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["merge", pytest.param("transplant", marks=pytest.mark.nessie)])
@pytest.mark.parametrize("kind", ["append", "replace", "create"])
@pytest.mark.parametrize("path", ["alone", "group", "serializable"])
def test_a_merge_outside_branchlake_is_not_replayed(bench: Workbench, how: str, kind: str, path: str) -> None:
    if kind != "create":
        bench.seeded([("a", 0), ("b", 0)])
    x, y = bench.run(reads=["t"] if path == "serializable" else None), bench.run()
    for run, day in ((x, "a"), (y, "b")):
        if kind == "create":
            run.create()
        if kind == "replace":
            run.replace(day, [(day, 1)])
        else:
            run.append([(day, 1)])
    if how == "merge":
        merge(bench.lake, x.name)
    else:
        transplant(bench.lake, x)
    groups = [(y, x)] if path == "group" else [(y,), (x,)]
    results = [result for group in groups for result in bench.publish(*group)]
    assert all(isinstance(one, Published) for one in results), results
    assert [one.merged_outside for one in results if isinstance(one, Published)] == [False, True]
    kept = {"append": [("a", 0), ("b", 0)]}.get(kind, [])
    assert bench.rows() == sorted([*kept, ("a", 1), ("b", 1)])
    assert bench.published(x)[0].merged_outside
    assert len(bench.rows()) == len(kept) + 2


@pytest.mark.nessie
def test_a_renamed_table_that_was_transplanted_outside_branchlake(bench: Workbench) -> None:
    """Nessie refuses to merge it, and a transplant loses the new name: the publication brings it."""
    bench.seeded([("a", 0)])
    x = bench.run()
    x.append([("a", 1)])
    x.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    transplant(bench.lake, x)
    bench.published(x)
    assert bench.rows("u") == [("a", 0), ("a", 1)]


def test_a_part_that_was_merged_outside_branchlake_is_reported(bench: Workbench) -> None:
    bench.seeded([("a", 0)], spec=FLAT)
    x, y = bench.run(), bench.run()
    x.append([("a", 1)])
    half = bench.lake.nessie.reference(x.name).hash
    x.append([("a", 2)])
    y.append([("b", 3)])
    merge(bench.lake, x.name, half)
    bench.published(y)
    refused = bench.refused(x)
    assert refused.codes == ("partly_on_main",)
    assert bench.rows() == [("a", 0), ("a", 1), ("b", 3)]


def table(namespace: str, name: str = "t") -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], metadata=table_metadata(write_mode="append"))
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


def checked(asset: dg.AssetsDefinition, *, passes: bool = True) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, metadata={"branchlake/scope": "rows"})
    def fine() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=passes)

    return fine


def test_it_is_reported_by_its_kind(lakehouse: Lakehouse, namespace: str) -> None:
    asset = table(namespace)
    with project(lakehouse, asset, checked(asset)) as p:
        run_id = p.run()
        done = merge(lakehouse, run_branch_name(run_id))
        outcome = p.settle(run_id)
        assert (outcome.state, outcome.publication) == (RunState.PUBLISHED, done)
        assert "merged outside branchlake" in outcome.detail
        (told,) = p.observations([namespace, "t"])
        assert told.description == f"On main already: its branch was merged outside branchlake, as {done}."
        assert run_branch_name(run_id) not in p.branches()
        assert p.rows(namespace, "t") == [{"n": 1}]


def test_a_blocked_run_that_was_merged_outside_branchlake_is_reported_as_on_main(
    lakehouse: Lakehouse, namespace: str
) -> None:
    asset = table(namespace)
    with project(lakehouse, asset, checked(asset, passes=False)) as p:
        run_id = p.run()
        done = merge(lakehouse, run_branch_name(run_id))
        outcome = p.settle(run_id)
        assert outcome.state is RunState.BLOCKED
        assert "merged_outside" in outcome.codes
        assert done in outcome.detail
        (told,) = p.observations([namespace, "t"])
        assert "outside branchlake" in (told.description or "")


# -- rolled back -----------------------------------------------------------------------------------------


@pytest.mark.nessie
@pytest.mark.parametrize("serializable", [False, True])
def test_main_is_rolled_back_below_the_base(bench: Workbench, serializable: bool) -> None:
    """A merge would bring back what was rolled back, and trying again helps nobody."""
    bench.seeded([("a", 0)])
    before = bench.lake.nessie.reference(MAIN).hash
    rolled_back = bench.run()
    rolled_back.append([("a", 1)])
    bench.published(rolled_back)
    late = bench.run(reads=["t"] if serializable else None)
    late.append([("a", 2)])
    assign_main(bench.lake, before)
    refused = bench.refused(late)
    assert (refused.codes, [*refused.conflicts]) == (("base_not_on_main",), [f"{bench.namespace}.t"])
    assert bench.rows() == [("a", 0)]


@pytest.mark.nessie
def test_a_run_whose_base_was_rolled_back_is_reported(lakehouse: Lakehouse, namespace: str) -> None:
    asset, other = table(namespace), table(namespace, "other")
    with project(lakehouse, asset, other, checked(asset)) as p:
        before = lakehouse.nessie.reference(MAIN).hash
        p.settle(p.run(asset.key))
        run_id = p.run(asset.key)
        assign_main(lakehouse, before)
        outcome = p.settle(run_id)
        assert outcome.state is RunState.REFUSED
        assert outcome.codes == ("base_not_on_main",)
        run = p.instance.get_run_by_id(run_id)
        assert run is not None
        assert "set back" in run.tags[RunTag.REASON]
        assert run_branch_name(run_id) not in p.branches()


def test_a_branch_that_was_deleted_outside_branchlake_is_not_published(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    x = bench.run()
    x.append([("a", 1)])
    candidate = x.candidate()
    bench.lake.nessie.delete_branch(x.name, expected_hash=candidate.head_hash)
    (result,) = bench.publisher.publish([candidate]).values()
    assert not isinstance(result, Published | Refused)
    assert bench.rows() == [("a", 0)]
