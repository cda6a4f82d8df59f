"""The benchmark `branchlake bench publication`: the cost of branches, publications and clean-up."""

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
    measure_expired_rebase_ms,
    measure_ledger_ms,
    measure_overhead,
    measure_rebase_ms,
    measure_reconcile,
    measure_replaced_runs,
    measure_waiting_runs,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.ledger import Candidate, Published, load_write_set
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster.runs.discarding import discard_branch
from branchlake_dagster.runs.run_branch import RunBranch, ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo

_NAMESPACE = "bench"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False), NestedField(2, "n", LongType()))
_GROUP_SIZE = 8
"""The number of runs that one group commit publishes into the same table."""
_MAX_REPLACED = 200
"""Maximum number of waiting runs that replaced a partition. Creating them is slower than publishing them."""


@dataclass
class _Samples:
    """Durations in milliseconds, by the name of the timed call."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def time_call(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.by_name.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    def quantiles(self, name: str) -> dict[str, float]:
        values = self.by_name[name]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return {
            "p50": round(cuts[49], 1),
            "p90": round(cuts[89], 1),
            "p99": round(cuts[98], 1),
            "n": len(values),
        }


class _PublicationBench:
    """A lake with branches to publish. Every run writes a row with a unique token into each of its tables."""

    def __init__(self, lake: Lakehouse) -> None:
        self.lake = lake
        self.nessie = lake.nessie
        self.publisher = build_publisher(lake)
        self.tokens: dict[str, list[str]] = {}
        ensure_main_has_commit(self.nessie)
        lake.catalog().create_namespace((_NAMESPACE,))

    def create_table(self, name: str) -> None:
        self.lake.catalog().create_table((_NAMESPACE, name), _SCHEMA)
        self.tokens.setdefault(name, [])

    def create_run(self, *tables: str, base: str | None = None) -> Candidate:
        """Create the branch of a run that appended a row to each table."""
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
        return Candidate(
            name, head.hash, base, run_id, run_id, "passed", load_write_set(self.nessie, base, head)
        )

    def publish(self, candidates: Sequence[Candidate]) -> None:
        for result in self.publisher.publish(candidates).values():
            if not isinstance(result, Published):
                raise RuntimeError(f"A publication of the benchmark failed: {result}")

    def merge(self, candidate: Candidate) -> None:
        """Merge the branch with Nessie's own call, for comparison."""
        self.nessie.merge(
            from_name=candidate.branch,
            from_hash=candidate.head_hash,
            into=MAIN,
            expected_hash=candidate.base_hash,
            message="merge",
        )

    def delete_branches(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self.nessie.delete_branch(candidate.branch, expected_hash=candidate.head_hash)

    def count_lost_and_doubled(self) -> tuple[int, int]:
        """Count the published tokens that `main` lacks, and the doubled or unknown rows of `main`."""
        lost = doubled = 0
        for name, tokens in self.tokens.items():
            rows = self.lake.catalog().load_table((_NAMESPACE, name)).scan().to_arrow()["token"].to_pylist()
            lost += len(set(tokens) - set(rows))
            doubled += len(rows) - len(set(rows)) + len(set(rows) - set(tokens))
        return lost, doubled


def measure_publication(
    settings: Settings, *, rounds: int, branches: int, waiting: int, commits: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all figures in a temporary lake. Each key ends in the unit of its figure."""
    with own_lake(settings) as bench_settings:
        lake = Lakehouse(bench_settings, say=say)
        try:
            bench = _PublicationBench(lake)
            samples = _Samples()
            figures: dict[str, Any] = {}
            say("Creating and discarding branches …")
            _time_create_and_discard(bench, samples, rounds)
            say("Publishing one and ten tables, compared with Nessie's merge …")
            _time_publications(bench, samples, rounds)
            say("Publishing into one table …")
            figures |= _time_same_table(bench, samples, rounds)
            figures |= _time_disjoint_tables(bench, rounds)
            say("Undoing publications of ten tables …")
            _time_undo(bench, samples, max(10, rounds // 5))
            lost, doubled = bench.count_lost_and_doubled()
            say(f"Publishing {waiting:,} finished runs of one table …")
            figures |= measure_waiting_runs(lake, waiting, say=say)
            replaced_count = min(waiting, _MAX_REPLACED)
            say(f"Publishing {replaced_count:,} finished runs that each replaced a partition …")
            figures |= measure_replaced_runs(lake, replaced_count, say=say)
            say(f"Reconciling {branches:,} branches …")
            figures["reconcile_10k_s"] = round(measure_reconcile(lake, branches, say=say), 2)
            say(f"Writing a long history: 5,000 snapshots, {commits:,} commits …")
            figures["rebase_2_snapshots_ms"] = measure_rebase_ms(lake, 2)
            figures["rebase_5000_snapshots_ms"] = measure_rebase_ms(lake, 5000)
            figures["rebase_5000_expired_ms"] = measure_expired_rebase_ms(lake, 5000)
            first, next_process, later = measure_ledger_ms(lake, commits, say=say)
            figures |= {
                "ledger_50k_commits_ms": later,
                "ledger_50k_commits_first_ms": first,
                "ledger_50k_commits_next_process_ms": next_process,
                "commits": commits,
            }
            say("Writing for ten seconds, on a branch and directly to main …")
            figures |= measure_overhead(lake, say=say)
        finally:
            lake.servers.stop_all()
    times = {name: samples.quantiles(name) for name in samples.by_name}
    return {
        "create_p90_ms": times["create"]["p90"],
        "publish_p50_ms": times["publish"]["p50"],
        "publish_floor_p50_ms": times["publish floor"]["p50"],
        "publish10_p50_ms": times["publish 10"]["p50"],
        "rebase_p50_ms": times["rebase"]["p50"],
        "undo_ten_tables_ms": times["undo 10"]["p50"],
        **figures,
        "lost": lost,
        "doubled": doubled,
        "branches": branches,
        "ms": times,
    }


def _time_create_and_discard(bench: _PublicationBench, samples: _Samples, rounds: int) -> None:
    for _ in range(rounds):
        run = RunBranch(lambda: bench.nessie, str(uuid.uuid4()), load_tags=dict, add_tags=lambda _: None)
        with samples.time_call("create"):
            run.open()
        head = bench.nessie.reference(MAIN).hash
        name = f"run-{uuid.uuid4()}"
        with samples.time_call("create floor"):
            bench.nessie.create_branch(name, from_ref=MAIN, from_hash=head)
        bench.nessie.delete_branch(name, expected_hash=head)
        bench.nessie.delete_branch(run.open().branch, expected_hash=run.load_head().hash)
    bench.create_table("discarded")
    candidates = [bench.create_run("discarded") for _ in range(max(20, rounds // 4))]
    bench.tokens["discarded"].clear()
    for candidate in candidates:
        branch = bench.nessie.reference(candidate.branch)
        with samples.time_call("discard"):
            tag = discard_branch(bench.nessie, branch)
        if isinstance(tag, Reference):
            bench.nessie.delete_tag(tag.name, expected_hash=tag.hash)


def _time_publications(bench: _PublicationBench, samples: _Samples, rounds: int) -> None:
    ten = [f"ten_{number}" for number in range(10)]
    for name in ("one", *ten):
        bench.create_table(name)
    for tables, label, count in ((("one",), "publish", rounds), (ten, "publish 10", max(10, rounds // 5))):
        for _ in range(count):
            # The two ways take turns, so that the growing history affects both in the same way.
            candidate = bench.create_run(*tables)
            with samples.time_call(label):
                bench.publish([candidate])
            merge_candidate = bench.create_run(*tables)
            with samples.time_call(f"{label} floor"):
                bench.merge(merge_candidate)
            bench.delete_branches([candidate, merge_candidate])


def _time_undo(bench: _PublicationBench, samples: _Samples, count: int) -> None:
    """Time the undo of a publication of ten tables, after a later publication of the same tables."""
    names = [f"undone_{number}" for number in range(10)]
    for name in names:
        bench.create_table(name)
    for _ in range(count):
        candidate = bench.create_run(*names)
        for name in names:
            bench.tokens[name].pop()  # the undo removes these rows
        bench.publish([candidate])
        later_candidate = bench.create_run(*names)
        bench.publish([later_candidate])
        with samples.time_call("undo 10"):
            undoer = PublicationUndo.of_lake(bench.lake)
            undo = undoer.undo(find_publication(bench.nessie, candidate.run_id))
        if undo.commit is None or len(undo.tables) != len(names):
            raise RuntimeError(f"An undo of the benchmark changed too little: {undo}")
        bench.delete_branches([candidate, later_candidate])


def _time_same_table(bench: _PublicationBench, samples: _Samples, rounds: int) -> dict[str, float]:
    """Time publications into one table by runs that all started before the first publication."""
    for name in ("rebased", "grouped", "raced"):
        bench.create_table(name)
    base = bench.nessie.reference(MAIN).hash
    rebase_candidates = [bench.create_run("rebased", base=base) for _ in range(rounds)]
    bench.publish([rebase_candidates[0]])
    for candidate in rebase_candidates[1:]:
        with samples.time_call("rebase"):
            bench.publish([candidate])
    single_rate = 1000 * (rounds - 1) / sum(samples.by_name["rebase"])
    bench.delete_branches(rebase_candidates)
    group_candidates = [
        bench.create_run("grouped", base=base) for _ in range(rounds // _GROUP_SIZE * _GROUP_SIZE)
    ]
    bench.publish([bench.create_run("grouped", base=base)])
    began = time.perf_counter()
    for start in range(0, len(group_candidates), _GROUP_SIZE):
        with samples.time_call(f"group of {_GROUP_SIZE}"):
            bench.publish(group_candidates[start : start + _GROUP_SIZE])
    group_rate = len(group_candidates) / (time.perf_counter() - began)
    bench.delete_branches(group_candidates)
    race_candidates = [bench.create_run("raced", base=base) for _ in range(_GROUP_SIZE * 2)]
    race_rate = _race_publishers(bench, race_candidates)
    bench.delete_branches(race_candidates)
    return {
        "same_table_per_s": round(single_rate, 1),
        "same_table_group_per_s": round(group_rate, 1),
        "same_table_racing_per_s": round(race_rate, 1),
    }


def _race_publishers(bench: _PublicationBench, candidates: Sequence[Candidate]) -> float:
    """Publish into one table with eight concurrent publishers, as runs that publish themselves do.

    Each publisher repeats until its run is published. Returns publications per second.
    """

    def publish(candidate: Candidate) -> None:
        while not isinstance(build_publisher(bench.lake).publish([candidate])[candidate.branch], Published):
            time.sleep(0.01)

    began = time.perf_counter()
    with ThreadPoolExecutor(_GROUP_SIZE) as pool:
        list(pool.map(publish, candidates))
    return len(candidates) / (time.perf_counter() - began)


def _time_disjoint_tables(bench: _PublicationBench, rounds: int) -> dict[str, float]:
    names = [f"own_{number}" for number in range(rounds)]
    for name in names:
        bench.create_table(name)
    candidates = [bench.create_run(name) for name in names]
    half = len(candidates) // 2
    began = time.perf_counter()
    bench.publish(candidates[:half])
    single_rate = half / (time.perf_counter() - began)
    indexes = itertools.cycle(range(_GROUP_SIZE))
    shares: list[list[Candidate]] = [[] for _ in range(_GROUP_SIZE)]
    for candidate, share in zip(candidates[half:], indexes, strict=False):
        shares[share].append(candidate)
    barrier = threading.Barrier(_GROUP_SIZE)

    def publish(share: list[Candidate]) -> None:
        barrier.wait()
        bench.publish(share)

    began = time.perf_counter()
    with ThreadPoolExecutor(_GROUP_SIZE) as pool:
        list(pool.map(publish, shares))
    parallel_rate = (len(candidates) - half) / (time.perf_counter() - began)
    bench.delete_branches(candidates)
    return {"disjoint_per_s": round(single_rate, 1), "disjoint_8_per_s": round(parallel_rate, 1)}


def show_publication(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console = Console()
    times = Table("what", "p50, ms", "p90, ms", "p99, ms", "n", title="Single calls")
    for name, cut in figures["ms"].items():
        times.add_row(name, *(f"{cut[key]:.1f}" for key in ("p50", "p90", "p99")), str(cut["n"]))
    console.print(times)
    rates = Table("what", "value", title="Together")
    for name, value in figures.items():
        if name not in ("ms",):
            rates.add_row(name, str(value))
    console.print(rates)
