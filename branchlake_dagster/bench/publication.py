"""`branchlake bench publication`: what branch, publication and clean-up cost, beside Nessie's bare calls."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.publication_workloads import (
    ledger_ms,
    overhead,
    rebase_ms,
    reconcile_seconds,
    waiting_replaced_seconds,
    waiting_seconds,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.ledger import Candidate, Published, write_set
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.discarding import discard
from branchlake_dagster.runs.run_branch import RunBranch, main_with_history
from branchlake_dagster.settings import Settings

_NAMESPACE = "bench"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False), NestedField(2, "n", LongType()))
_WAITING = 8
"""Runs that wait for one table at the same time (group commit)."""
_REPLACED = 200
"""Most runs that have replaced a partition and wait. To make them takes longer than to publish them."""


@dataclass
class _Samples:
    """Milliseconds by what was timed."""

    found: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.found.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    def quantiles(self, name: str) -> dict[str, float]:
        values = self.found[name]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return {
            "p50": round(cuts[49], 1),
            "p90": round(cuts[89], 1),
            "p99": round(cuts[98], 1),
            "n": len(values),
        }


class _Bench:
    """A lake with branches to publish. Every run writes one row with a token of its own."""

    def __init__(self, lake: Lakehouse) -> None:
        self.lake = lake
        self.nessie = lake.nessie
        self.publisher = publisher_of(lake)
        self.tokens: dict[str, list[str]] = {}
        main_with_history(self.nessie)
        lake.catalog().create_namespace((_NAMESPACE,))

    def create_table(self, name: str) -> None:
        self.lake.catalog().create_table((_NAMESPACE, name), _SCHEMA)
        self.tokens.setdefault(name, [])

    def run(self, *tables: str, base: str | None = None) -> Candidate:
        """A run's branch that has appended a row to each table."""
        base = base or self.nessie.reference(MAIN).hash
        run_id = str(uuid.uuid4())
        name = f"run-{run_id}"
        self.nessie.create_branch(name, from_ref=MAIN, from_hash=base)
        catalog = self.lake.catalog(name)
        for table in tables:
            token = str(uuid.uuid4())
            self.tokens[table].append(token)
            catalog.load_table((_NAMESPACE, table)).append(
                pa.table({"token": [token], "n": pa.array([1], pa.int64())}),
                snapshot_properties={"branchlake.write_mode": "append", "branchlake.run_id": run_id},
            )
        head = self.nessie.reference(name)
        return Candidate(name, head.hash, base, run_id, run_id, "passed", write_set(self.nessie, base, head))

    def publish(self, candidates: Sequence[Candidate]) -> None:
        for result in self.publisher.publish(candidates).values():
            if not isinstance(result, Published):
                raise RuntimeError(f"A benchmark's publication failed: {result}")

    def merge(self, candidate: Candidate) -> None:
        """The floor: Nessie's own call."""
        self.nessie.merge(
            from_name=candidate.branch,
            from_hash=candidate.head_hash,
            into=MAIN,
            expected_hash=candidate.base_hash,
            message="merge",
        )

    def drop(self, candidates: Sequence[Candidate]) -> None:
        for one in candidates:
            self.nessie.delete_branch(one.branch, expected_hash=one.head_hash)

    def lost_and_doubled(self) -> tuple[int, int]:
        """Tokens of published runs that are not on `main`, and rows beyond one per token."""
        lost = doubled = 0
        for name, tokens in self.tokens.items():
            rows = self.lake.catalog().load_table((_NAMESPACE, name)).scan().to_arrow()["token"].to_pylist()
            lost += len(set(tokens) - set(rows))
            doubled += len(rows) - len(set(rows)) + len(set(rows) - set(tokens))
        return lost, doubled


def measure(
    settings: Settings, *, rounds: int, branches: int, waiting: int, commits: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All figures, in one run on an embedded stack of its own. Times in the keys' units."""
    with own_lake(settings) as own:
        lake = Lakehouse(own, say=say)
        try:
            bench = _Bench(lake)
            samples = _Samples()
            found: dict[str, Any] = {}
            say("Branches: create and discard …")
            _create_and_discard(bench, samples, rounds)
            say("Publications of one and of ten tables, beside the bare merge …")
            _publish(bench, samples, rounds)
            say("Publications into one table …")
            found |= _same_table(bench, samples, rounds)
            found |= _disjoint(bench, rounds)
            lost, doubled = bench.lost_and_doubled()
            say(f"{waiting:,} finished runs of one table …")
            found |= waiting_seconds(lake, waiting, say=say)
            replaced = min(waiting, _REPLACED)
            say(f"{replaced:,} finished runs that replaced a partition each …")
            found |= waiting_replaced_seconds(lake, replaced, say=say)
            say(f"Reconciling {branches:,} branches …")
            found["reconcile_10k_s"] = round(reconcile_seconds(lake, branches, say=say), 2)
            say(f"A long history: 5,000 snapshots, {commits:,} commits …")
            found["rebase_2_snapshots_ms"] = rebase_ms(lake, 2)
            found["rebase_5000_snapshots_ms"] = rebase_ms(lake, 5000)
            first, later = ledger_ms(lake, commits, say=say)
            found |= {
                "ledger_50k_commits_ms": later,
                "ledger_50k_commits_first_ms": first,
                "commits": commits,
            }
            say("A write of ten seconds, on a branch and straight to main …")
            found |= overhead(lake, say=say)
        finally:
            lake.servers.down()
    times = {name: samples.quantiles(name) for name in samples.found}
    return {
        "create_p90_ms": times["create"]["p90"],
        "publish_p50_ms": times["publish"]["p50"],
        "publish_floor_p50_ms": times["publish floor"]["p50"],
        "publish10_p50_ms": times["publish 10"]["p50"],
        "rebase_p50_ms": times["rebase"]["p50"],
        **found,
        "lost": lost,
        "doubled": doubled,
        "branches": branches,
        "ms": times,
    }


def _create_and_discard(bench: _Bench, samples: _Samples, rounds: int) -> None:
    for _ in range(rounds):
        run = RunBranch(lambda: bench.nessie, str(uuid.uuid4()), tags=dict, remember=lambda _: None)
        with samples.timed("create"):
            run.open()
        head = bench.nessie.reference(MAIN).hash
        name = f"run-{uuid.uuid4()}"
        with samples.timed("create floor"):
            bench.nessie.create_branch(name, from_ref=MAIN, from_hash=head)
        bench.nessie.delete_branch(name, expected_hash=head)
        bench.nessie.delete_branch(run.open().branch, expected_hash=run.head().hash)
    bench.create_table("discarded")
    doomed = [bench.run("discarded") for _ in range(max(20, rounds // 4))]
    bench.tokens["discarded"].clear()
    for one in doomed:
        branch = bench.nessie.reference(one.branch)
        with samples.timed("discard"):
            tag = discard(bench.nessie, branch)
        if isinstance(tag, Reference):
            bench.nessie.delete_tag(tag.name, expected_hash=tag.hash)


def _publish(bench: _Bench, samples: _Samples, rounds: int) -> None:
    ten = [f"ten_{number}" for number in range(10)]
    for name in ("one", *ten):
        bench.create_table(name)
    for tables, label, count in ((("one",), "publish", rounds), (ten, "publish 10", max(10, rounds // 5))):
        for _ in range(count):
            # Side by side, so that the growing history weighs on both alike.
            candidate = bench.run(*tables)
            with samples.timed(label):
                bench.publish([candidate])
            plain = bench.run(*tables)
            with samples.timed(f"{label} floor"):
                bench.merge(plain)
            bench.drop([candidate, plain])


def _same_table(bench: _Bench, samples: _Samples, rounds: int) -> dict[str, float]:
    """Runs that all started before any of them was published."""
    for name in ("rebased", "grouped", "raced"):
        bench.create_table(name)
    base = bench.nessie.reference(MAIN).hash
    waiting = [bench.run("rebased", base=base) for _ in range(rounds)]
    bench.publish([waiting[0]])
    for candidate in waiting[1:]:
        with samples.timed("rebase"):
            bench.publish([candidate])
    one_by_one = 1000 * (rounds - 1) / sum(samples.found["rebase"])
    bench.drop(waiting)
    grouped = [bench.run("grouped", base=base) for _ in range(rounds // _WAITING * _WAITING)]
    bench.publish([bench.run("grouped", base=base)])
    began = time.perf_counter()
    for start in range(0, len(grouped), _WAITING):
        with samples.timed(f"group of {_WAITING}"):
            bench.publish(grouped[start : start + _WAITING])
    group_rate = len(grouped) / (time.perf_counter() - began)
    bench.drop(grouped)
    raced = [bench.run("raced", base=base) for _ in range(_WAITING * 2)]
    race_rate = _raced(bench, raced)
    bench.drop(raced)
    return {
        "same_table_per_s": round(one_by_one, 1),
        "same_table_group_per_s": round(group_rate, 1),
        "same_table_racing_per_s": round(race_rate, 1),
    }


def _raced(bench: _Bench, candidates: Sequence[Candidate]) -> float:
    """Eight publishers at once into one table, as runs that publish themselves do; each tries until done."""

    def publish(candidate: Candidate) -> None:
        while not isinstance(publisher_of(bench.lake).publish([candidate])[candidate.branch], Published):
            time.sleep(0.01)

    began = time.perf_counter()
    with ThreadPoolExecutor(_WAITING) as pool:
        list(pool.map(publish, candidates))
    return len(candidates) / (time.perf_counter() - began)


def _disjoint(bench: _Bench, rounds: int) -> dict[str, float]:
    names = [f"own_{number}" for number in range(rounds)]
    for name in names:
        bench.create_table(name)
    candidates = [bench.run(name) for name in names]
    half = len(candidates) // 2
    began = time.perf_counter()
    bench.publish(candidates[:half])
    alone = half / (time.perf_counter() - began)
    rest = itertools.cycle(range(_WAITING))
    shares: list[list[Candidate]] = [[] for _ in range(_WAITING)]
    for candidate, share in zip(candidates[half:], rest, strict=False):
        shares[share].append(candidate)
    barrier = threading.Barrier(_WAITING)

    def publish(share: list[Candidate]) -> None:
        barrier.wait()
        bench.publish(share)

    began = time.perf_counter()
    with ThreadPoolExecutor(_WAITING) as pool:
        list(pool.map(publish, shares))
    together = (len(candidates) - half) / (time.perf_counter() - began)
    bench.drop(candidates)
    return {"disjoint_per_s": round(alone, 1), "disjoint_8_per_s": round(together, 1)}


def show(found: dict[str, Any]) -> None:
    """The figures as tables."""
    console = Console()
    times = Table("what", "p50, ms", "p90, ms", "p99, ms", "n", title="Single calls")
    for name, cut in found["ms"].items():
        times.add_row(name, *(f"{cut[key]:.1f}" for key in ("p50", "p90", "p99")), str(cut["n"]))
    console.print(times)
    rates = Table("what", "value", title="Together")
    for name, value in found.items():
        if name not in ("ms",):
            rates.add_row(name, str(value))
    console.print(rates)
