"""One run's trouble is its own: the others are published, and it is tried later and later, then set aside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication import assessment as assess
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.parked_runs import MAX_ATTEMPTS
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def appending(namespace: str, name: str = "t") -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], metadata=table_metadata(write_mode="append", require_checks=False))
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


@dataclass
class Clock:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def one_pass(p: Project, clock: Clock | None = None) -> dict[str, Outcome]:
    """The outcomes of this project's runs."""
    ours = {run.run_id for run in p.instance.get_runs()}
    reconciler = p.reconciler(now=clock) if clock else p.reconciler()
    return {outcome.run_id: outcome for outcome in reconciler.reconcile_branches() if outcome.run_id in ours}


def metadata_file(p: Project, run_id: str, namespace: str, name: str = "t") -> Path:
    """Where the run's branch says the table is."""
    table = p.lake.catalog(run_branch_name(run_id)).load_table((namespace, name))
    return Path(table.metadata_location.removeprefix("file://"))


def kept(location: Path) -> Path:
    return location.with_suffix(".kept")


@pytest.fixture
def three(lakehouse: Lakehouse, namespace: str) -> Iterator[tuple[Project, str, str, str]]:
    """Three runs that wait for one table; the second one's metadata file is empty."""
    with project(lakehouse, appending(namespace), appending(namespace, "u")) as p:
        p.settle(p.run(dg.AssetKey([namespace, "t"])))
        ids = [p.run(dg.AssetKey([namespace, "t"])) for _ in range(3)]
        location = metadata_file(p, ids[1], namespace)
        location.rename(kept(location))
        location.write_text("")
        yield p, *ids
        for ref in [ref for ref in lakehouse.nessie.references() if ids[1] in ref.name]:
            delete = lakehouse.nessie.delete_tag if ref.type == "TAG" else lakehouse.nessie.delete_branch
            delete(ref.name, expected_hash=ref.hash)


def test_an_empty_metadata_file_delays_no_other_run(
    three: tuple[Project, str, str, str], namespace: str, clock: Clock
) -> None:
    p, one, broken, other = three
    elsewhere = p.run(dg.AssetKey([namespace, "u"]))
    found = one_pass(p, clock)
    assert {run_id: found[run_id].state for run_id in (one, broken, other, elsewhere)} == {
        one: RunState.PUBLISHED,
        broken: RunState.TRY_AGAIN,
        other: RunState.PUBLISHED,
        elsewhere: RunState.PUBLISHED,
    }
    assert len(p.rows(namespace, "t")) == 3


def test_attempts_get_rarer_until_the_run_is_parked(
    three: tuple[Project, str, str, str], clock: Clock
) -> None:
    p, _, broken, _ = three
    pauses = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert one_pass(p, clock)[broken].state is RunState.TRY_AGAIN
        tags = run_of(p, broken).tags
        assert tags[RunTag.ATTEMPTS] == str(attempt)
        assert tags[RunTag.REASON]
        if attempt < MAX_ATTEMPTS:
            assert one_pass(p, clock)[broken].state is RunState.WAITING
            due = datetime.fromisoformat(tags[RunTag.NEXT_ATTEMPT])
            pauses.append(round((due - clock.now).total_seconds() / 5))
            clock.now = due
    assert pauses == [2**n for n in range(MAX_ATTEMPTS - 1)]
    clock.now += timedelta(days=1)
    assert one_pass(p, clock)[broken].state is RunState.PARKED
    log = p.instance.all_logs(broken)
    assert any(f"branchlake set-aside retry {broken}" in entry.message for entry in log)
    assert run_branch_name(broken) in p.branches()


def run_of(p: Project, run_id: str) -> dg.DagsterRun:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return run


@contextmanager
def command(p: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`branchlake …` on the project's lake and Dagster instance."""
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(p.lake.settings.state_dir))
    monkeypatch.setattr("dagster.DagsterInstance.get", lambda: p.instance)
    monkeypatch.setattr(type(p.instance), "__exit__", lambda *_: None)

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(main, words, catch_exceptions=False)

    yield invoke


@pytest.fixture
def aside(three: tuple[Project, str, str, str], clock: Clock) -> tuple[Project, str]:
    p, _, broken, _ = three
    one_pass(p, clock)
    p.instance.add_run_tags(broken, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})
    return p, broken


def test_the_command_lists_and_retries(
    aside: tuple[Project, str], namespace: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    p, broken = aside
    with command(p, monkeypatch) as branchlake:
        (told,) = json.loads(branchlake("set-aside", "--json").output)
        assert (told["run_id"], told["branch"], told["attempts"]) == (broken, run_branch_name(broken), 1)
        assert told["reason"]
        assert broken[:8] in branchlake("set-aside").output
        wrong = branchlake("set-aside", "retry", "nobody")
        assert branchlake("set-aside", "end", "").exit_code == 1
        assert (wrong.exit_code, "nobody" in wrong.output) == (1, True)
        assert branchlake("set-aside", "retry", broken[:13]).exit_code == 0
    (content,) = p.lake.nessie.contents(run_branch_name(broken), [ContentKey([namespace, "t"])]).values()
    assert isinstance(content, IcebergTable)
    location = Path(content.metadata_location.removeprefix("file://"))
    kept(location).rename(location)  # somebody has put the file back meanwhile
    assert one_pass(p, clock)[broken].state is RunState.PUBLISHED
    assert len(p.rows(namespace, "t")) == 4
    assert run_of(p, broken).tags[RunTag.REASON] == "none"


@pytest.mark.nessie
def test_the_command_ends_it(aside: tuple[Project, str], monkeypatch: pytest.MonkeyPatch) -> None:
    p, broken = aside
    with command(p, monkeypatch) as branchlake:
        done = branchlake("set-aside", "end", broken)
        assert (done.exit_code, broken[:8] in done.output) == (0, True)
        assert json.loads(branchlake("set-aside", "--json").output) == []
    assert run_branch_name(broken) not in p.branches()
    tags = run_of(p, broken).tags
    assert tags[RunTag.VERDICT] == "blocked"
    assert tags[RunTag.REASON].startswith("Discarded by an operator")
    assert RunTag.PUBLICATION not in tags
    assert broken not in one_pass(p)


@pytest.mark.parametrize("error", [ValueError("a renamed key column"), KeyError("x"), AssertionError()])
def test_an_error_of_any_class_is_the_runs_own(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with project(lakehouse, appending(namespace)) as p:
        one, bad, other = (p.run() for _ in range(3))
        real = assess.collect_evidence

        def failing(instance: Any, runs: Any, *more: Any, **options: Any) -> Any:
            if runs[-1].run_id == bad:
                raise error
            return real(instance, runs, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(assess, "collect_evidence", failing)
            found = one_pass(p)
        assert [found[run_id].state for run_id in (one, bad, other)] == [
            RunState.PUBLISHED,
            RunState.TRY_AGAIN,
            RunState.PUBLISHED,
        ]
        assert type(error).__name__ in found[bad].detail
        assert one_pass(p, Clock(datetime.now(UTC) + timedelta(minutes=1)))[bad].state is RunState.PUBLISHED
        assert len(p.rows(namespace, "t")) == 3


def test_an_error_of_the_whole_group_is_divided(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nessie refuses the commit of several because of one of them."""
    with project(lakehouse, appending(namespace)) as p:
        p.settle(p.run())
        one, bad, other = (p.run() for _ in range(3))
        real = NessieClient.commit

        def refusing(self: NessieClient, branch: str, **options: Any) -> Any:
            if branch == "main" and bad in options["properties"]["branchlake.run_id"]:
                raise ValueError("no")
            return real(self, branch, **options)

        with monkeypatch.context() as patch:
            patch.setattr(NessieClient, "commit", refusing)
            found = one_pass(p)
        assert [found[run_id].state for run_id in (one, bad, other)] == [
            RunState.PUBLISHED,
            RunState.TRY_AGAIN,
            RunState.PUBLISHED,
        ]
        p.settle(bad)


@pytest.mark.parametrize("due", ["later", "2999-01-01T00:00:00", ""])
def test_a_tag_that_somebody_wrote_delays_no_run(lakehouse: Lakehouse, namespace: str, due: str) -> None:
    with project(lakehouse, appending(namespace)) as p:
        run_id = p.run()
        p.instance.add_run_tags(run_id, {RunTag.NEXT_ATTEMPT: due})
        assert one_pass(p)[run_id].state is RunState.PUBLISHED


def test_a_storage_that_cannot_note_the_trouble_stops_nobody(
    three: tuple[Project, str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, one, broken, other = three
    real = type(p.instance).add_run_tags

    def locked(self: dg.DagsterInstance, run_id: str, tags: Any) -> None:
        if run_id == broken:
            raise RuntimeError("database is locked")
        real(self, run_id, tags)

    monkeypatch.setattr(type(p.instance), "add_run_tags", locked)
    found = one_pass(p)
    assert found[broken].state is RunState.TRY_AGAIN
    assert {found[one].state, found[other].state} == {RunState.PUBLISHED}
