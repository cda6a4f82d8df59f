"""What peers lose, each as a test of its own, on the real server.

Where a behaviour needs many cases they stand in the test module named in its docstring; here is the one
that says it is there. Topics and offsets belong to ingestion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieOutcomeUnknown,
    NessieUnavailable,
    ReferenceNotFound,
    RetryPolicy,
)
from branchlake_dagster.nessie.transport import HttpTransport
from branchlake_dagster.publication.ledger import Published, Refused, iter_publications
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.workbench import Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

T = TypeVar("T")


class Lossy:
    """HTTP to the real server, of which the n-th request that changes something goes wrong."""

    def __init__(self, uri: str, *, lose: int, applied: bool) -> None:
        self._real = HttpTransport(uri, token=None, verify=True, connect_timeout_s=3, read_timeout_s=30)
        self.uri = self._real.uri
        self._lose = lose
        self._applied = applied
        self.changes = 0

    def close(self) -> None:
        self._real.close()

    def send(
        self,
        method: str,
        path: str,
        decode: Callable[[Any], T],
        *,
        action: str,
        changes: bool,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> T:
        self.changes += changes
        wrong = changes and self.changes == self._lose
        if wrong and not self._applied:
            raise NessieUnavailable(f"could not {action}")
        result = self._real.send(
            method, path, decode, action=action, changes=changes, params=params, body=body
        )
        if wrong:
            raise NessieOutcomeUnknown(f"the answer to {action} was lost")
        return result


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def appending(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False), name=None
    )
    def appended() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return appended


def settle_until_gone(p: Project, lake: Lakehouse, run_id: str, transport: Lossy) -> int:
    """Ticks of the sensor, over one unreliable connection, until the branch is gone; how many it took."""
    client = NessieClient(transport.uri, transport=transport, retry=RetryPolicy(()))
    publisher = Publisher(client, IcebergTableFormat(lake.catalog()))
    reconciler = Reconciler(
        client, publisher, p.instance, p.graph, lake.settings, read_metadata=lambda _: None
    )
    for tick in range(1, 10):
        reconciler.reconcile_run(run_id)
        if run_branch_name(run_id) not in p.branches():
            return tick
    raise AssertionError("the branch is still there")


@pytest.mark.nessie
@pytest.mark.parametrize("rebased", [False, True], ids=["merged", "rebased"])
@pytest.mark.parametrize("applied", [False, True], ids=["refused", "lost"])
def test_1_a_lost_reply_at_any_step_ends_in_one_publication(
    lakehouse: Lakehouse, namespace: str, applied: bool, rebased: bool
) -> None:
    """Every request that changes something is lost once: one publication, branch deleted, no human."""
    uri = lakehouse.nessie.uri
    with project(lakehouse, appending(namespace)) as p:
        p.settle(p.run())
        expected = 1
        steps, lose = 1, 1
        while lose <= steps:
            mine = p.run()
            if rebased:
                p.settle(p.run())
                expected += 1
            transport = Lossy(uri, lose=lose, applied=applied)
            settle_until_gone(p, lakehouse, mine, transport)
            expected += 1
            # Claim, merge, (commit,) delete the branch, delete the claim: what a run without faults does.
            steps = 5 if rebased else 4
            assert transport.changes >= lose, "the fault was never met"
            rows = p.rows(namespace, "t")
            assert len(rows) == expected, f"fault at change {lose}"
            told = [one for one in iter_publications(lakehouse.nessie, limit=20) if one.run_id == mine]
            assert len(told) == 1
            assert p.instance.get_run_by_id(mine).tags[RunTag.PUBLICATION] == told[0].hash
            lose += 1


def test_2_two_runs_append_to_one_table(bench: Workbench) -> None:
    """Both published once, in some order; of two overwrites the second is refused and named (test_rebase)."""
    bench.seeded([])
    one, two = bench.run(), bench.run()
    one.append([("a", 1)])
    two.append([("b", 2)])
    bench.published(two)
    bench.published(one)
    assert bench.rows() == [("a", 1), ("b", 2)]


def test_2_two_runs_overwrite_one_table(bench: Workbench) -> None:
    bench.seeded([])
    one, two = bench.run(), bench.run()
    one.replace("a", [("a", 1)])
    two.replace("a", [("a", 2)])
    bench.published(one)
    refused = bench.refused(two)
    assert (refused.partitions, refused.runs) == (("day=a",), (one.run_id,))
    assert bench.rows() == [("a", 1)]


@memory.ON_BOTH
def test_3_a_run_reads_what_another_publishes_meanwhile(lakehouse: Lakehouse, namespace: str) -> None:
    """Refused under serializable isolation, allowed under snapshot isolation: per asset."""

    @dg.asset(key=[namespace, "source"], metadata=table_metadata(require_checks=False))
    def source() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    def copy(name: str, isolation: Any) -> dg.AssetsDefinition:
        @dg.asset(
            key=[namespace, name],
            ins={"source": dg.AssetIn([namespace, "source"])},
            metadata=table_metadata(isolation=isolation, require_checks=False),
        )
        def copied(source: pl.DataFrame) -> pl.DataFrame:
            return source

        return copied

    assets = [source, copy("strict", "serializable"), copy("loose", "snapshot")]
    with project(lakehouse, *assets) as p:
        key = {name: dg.AssetKey([namespace, name]) for name in ("source", "strict", "loose")}
        p.settle(p.run(key["source"]))
        strict, loose = p.run(key["strict"]), p.run(key["loose"])
        newer = p.run(key["source"])
        p.settle(newer)
        refused = p.settle(strict)
        assert refused.state is RunState.REFUSED
        assert refused.codes == ("read_and_changed",)
        assert [name for name in (f"{namespace}.source", newer) if name not in refused.detail] == []
        assert p.settle(loose).state is RunState.PUBLISHED
        assert p.settle(p.run(key["strict"])).state is RunState.PUBLISHED


def test_4_a_missing_check_is_not_a_passed_one(lakehouse: Lakehouse, namespace: str) -> None:
    """Missing, crashed, skipped, stale-partition checks: test_gate, test_lifecycle."""

    @dg.asset(key=[namespace, "t"])
    def unchecked() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, unchecked) as p:
        assert p.settle(p.run()).state is RunState.BLOCKED
        assert not lakehouse.catalog().table_exists((namespace, "t"))


@pytest.mark.nessie
def test_5_a_publication_in_doubt_is_not_cleaned_up(bench: Workbench) -> None:
    """The reply to the merge is lost and the retries are used up: the branch stays until it is known."""
    bench.seeded([])
    run = bench.run()
    run.append([("a", 1)])
    transport = Lossy(bench.lake.nessie.uri, lose=1, applied=True)
    lossy = Publisher(
        NessieClient(transport.uri, transport=transport, retry=RetryPolicy(())),
        IcebergTableFormat(bench.lake.catalog()),
    )
    result = lossy.publish([run.candidate()])[run.name]
    assert isinstance(result, NessieOutcomeUnknown)
    assert run.name in {ref.name for ref in bench.lake.nessie.references()}
    (again,) = bench.publish(run)
    assert isinstance(again, Published)
    assert again.is_new is False
    assert bench.rows() == [("a", 1)]


@pytest.mark.parametrize("later", ["contents_at", "alive"])
def test_a_commit_in_doubt_stays_in_doubt_whatever_fails_after_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """The answer to the commit is lost, then the server is away, or the run is found to be fenced."""
    bench.seeded([])
    first, second = bench.run(), bench.run()
    first.append([("a", 1)])
    second.append([("b", 2)])
    bench.publish(first)
    client, lost = bench.lake.nessie, []
    commit, contents_at = client.commit, client.contents_at

    def lose_answer(*args: Any, **named: Any) -> Any:
        commit(*args, **named)
        lost.append(True)
        raise NessieOutcomeUnknown("the answer was lost")

    def away(*args: Any, **named: Any) -> Any:
        if lost and later == "contents_at":
            raise NessieUnavailable("away")
        return contents_at(*args, **named)

    def alive() -> None:
        if lost:
            raise ReferenceNotFound("fenced")

    with monkeypatch.context() as patch:
        patch.setattr(client, "commit", lose_answer)
        patch.setattr(client, "contents_at", away)
        result = Publisher(client, IcebergTableFormat(bench.lake.catalog())).publish(
            [second.candidate()], alive=alive
        )[second.name]
    if later == "contents_at":
        assert isinstance(result, NessieOutcomeUnknown)
    else:  # the second attempt finds the commit in the log before it would send another one
        assert isinstance(result, Published)
    assert sorted(bench.rows()) == [("a", 1), ("b", 2)]


def test_a_second_head_of_one_branch_is_not_a_second_publication(bench: Workbench) -> None:
    """A late write after the publication: the ledger knows the branch, whatever its head."""
    bench.seeded([])
    one, other = bench.run(), bench.run()
    one.append([("a", 1)])
    other.append([("b", 1)])
    bench.published(other)
    first = one.candidate()
    assert isinstance(bench.publisher.publish([first])[one.name], Published)
    one.append([("a", 2)])
    late = one.candidate()
    assert late.head_hash != first.head_hash
    assert bench.publisher.publish([late])[one.name] == replace(
        bench.publisher.publish([first])[one.name],
        is_new=False,
    )
    assert bench.rows() == [("a", 1), ("b", 1)]


def test_a_refusal_leaves_main_as_it_was(bench: Workbench) -> None:
    bench.seeded([("a", 0)])
    one, two = bench.run(), bench.run()
    one.replace("a", [("a", 1)])
    two.replace("a", [("a", 2)])
    bench.published(one)
    head = bench.lake.nessie.reference("main").hash
    assert isinstance(bench.publish(two)[0], Refused)
    assert bench.lake.nessie.reference("main").hash == head
