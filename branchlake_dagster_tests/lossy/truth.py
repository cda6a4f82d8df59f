"""What must hold when the network is whole again and everybody has come to rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import Publication, iter_publications
from branchlake_dagster.publication.new_publications import iter_publication_reports
from branchlake_dagster.runs.discarding import FAILING_STATUSES
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.runs.run_tags import NO_VALUE, RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.lossy.daemon import leftovers, settled
from branchlake_dagster_tests.lossy.plan import REFUSABLE, TABLES
from branchlake_dagster_tests.lossy.project import BROKEN, KIND, NAMESPACE, SPOILT

_ALL = sorted({table for tables in TABLES.values() for table in tables})


@dataclass(frozen=True)
class World:
    """What is to be compared: the lake, Dagster's runs, and the ledger, oldest publication first."""

    lake: Lakehouse
    instance: dg.DagsterInstance
    runs: Mapping[str, dg.DagsterRun]
    ledger: Sequence[Publication]

    @classmethod
    def now(cls, lake: Lakehouse, instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> World:
        """As it stands; `lake` must not go through the proxy."""
        found = list(iter_publications(lake.nessie))[::-1]
        return cls(lake, instance, {run.run_id: run for run in runs}, found)

    def problems(self) -> list[str]:
        """Whatever is not as it should be, one sentence each; empty: all is well."""
        return [
            *self._ledger(),
            *self._rows(),
            *self._verdicts(),
            *self._tellings(),
            *(f"{name} is left in Nessie" for name in leftovers(self.lake.nessie)),
            *(
                f"a heartbeat on {beat.branch} is left"
                for beat in HeartbeatStore.from_settings(self.lake.settings).all()
            ),
        ]

    def rows(self, table: str) -> list[dict[str, Any]]:
        """All rows of a table on `main`; none of a table that is not there."""
        catalog = self.lake.catalog()
        if not catalog.table_exists((NAMESPACE, table)):
            return []
        return list(catalog.load_table((NAMESPACE, table)).scan().to_arrow().to_pylist())

    def _ledger(self) -> Iterator[str]:
        for run_id, count in Counter(one.run_id for one in self.ledger).items():
            if count > 1:
                yield f"run {run_id} was published {count} times"
            if run_id not in self.runs:
                yield f"run {run_id} was published and nobody has launched it"

    def _rows(self) -> Iterator[str]:
        """Each row of a published run is there once, and no other."""
        tokens: dict[str, list[str]] = {table: [] for table in _ALL}
        parts: dict[str, str] = {}
        for one in self.ledger:
            if (run := self.runs.get(one.run_id)) is None:
                continue
            for table in TABLES[run.job_name]:
                if table == "parts":
                    parts[run.tags["dagster/partition"]] = one.run_id
                else:
                    tokens[table].append(one.run_id)
        tokens["parts"] = list(parts.values())
        for table in _ALL:
            found, wanted = Counter(row["token"] for row in self.rows(table)), Counter(tokens[table])
            yield from (f"{table} lacks {count} of {token}" for token, count in (wanted - found).items())
            yield from (f"{table} has {count} of {token}" for token, count in (found - wanted).items())
        yield from self._saw()

    def _saw(self) -> Iterator[str]:
        """A serializable run has seen as many rows as `watched` had when it was published."""
        seen = {row["token"]: row["seen"] for row in self.rows("strict")}
        commits = list(dict.fromkeys(one.hash for one in self.ledger))
        jobs = {one.run_id: (self.runs[one.run_id].job_name, commits.index(one.hash)) for one in self.ledger}
        for run_id, (job, place) in jobs.items():
            if job == "strict":
                before = sum(other == "watch" and at < place for other, at in jobs.values())
                together = sum(other == "watch" and at == place for other, at in jobs.values())
                if not before <= seen.get(run_id, -1) <= before + together:
                    yield f"{run_id} is serializable and saw {seen.get(run_id)} rows of {before}"

    def _verdicts(self) -> Iterator[str]:
        """The runs' tags say what `main` says, and the gate let through what it should."""
        published = {one.run_id: one.hash for one in self.ledger}
        for run_id, run in self.runs.items():
            kind, told = run.tags[KIND], run.tags.get(RunTag.PUBLICATION, NO_VALUE)
            name = f"run {run_id} ({kind}, {run.status.value.lower()})"
            if not settled(run):
                yield f"{name} has no verdict: {run.tags}"
            if told != published.get(run_id, NO_VALUE):
                yield f"{name} says it was published as {told}; main says {published.get(run_id, NO_VALUE)}"
            if run_id in published:
                if SPOILT in run.tags or BROKEN in run.tags:
                    yield f"{name} was published"
                if not run.is_success and run.job_name != "inside":
                    yield f"{name} was published and has not succeeded"
                if run.tags.get(RunTag.VERDICT) != "passed":
                    yield f"{name} was published with the verdict {run.tags.get(RunTag.VERDICT)}"
                continue
            status = run.tags.get(RunTag.STATUS)
            if (run.is_success or status == RunState.REFUSED) and kind not in REFUSABLE | {"spoilt"}:
                yield f"{name} passed and was not published: {run.tags.get(RunTag.REASON)}"
            if status in FAILING_STATUSES and run.is_success:
                yield f"{name} is {status} and looks green"

    def _tellings(self) -> Iterator[str]:
        """Each publication was told each of its assets once, and nothing else was."""
        wanted = Counter(
            (one.branch, one.hash, table)
            for one in self.ledger
            if one.run_id in self.runs
            for table in TABLES[self.runs[one.run_id].job_name]
        )
        found = Counter(
            (one.branch, one.commit, table)
            for table in _ALL
            for one in iter_publication_reports(
                self.instance, dg.AssetKey([NAMESPACE, table]), after_id=0, last_id=2**60
            )
        )
        yield from (f"{branch} was not told {table}" for branch, _, table in wanted - found)
        yield from (
            f"{table} was told {found[name]} times of {name[0]} as {name[1][:12]}"
            for name in found - wanted
            for table in name[2:]
        )
