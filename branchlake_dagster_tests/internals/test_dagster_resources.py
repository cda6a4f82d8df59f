"""Copies of resources: only what differs is configured anew."""

# No `from __future__ import annotations`: Dagster reads the annotations.
from typing import Any

import dagster as dg
import pytest
from pydantic import PrivateAttr

from branchlake_dagster.internals.dagster import CopiedByFields

configured: list[str] = []
seen: list[tuple[str, str, int, str, bool]] = []


class Store(CopiedByFields, dg.ConfigurableResource[Any]):
    """Where things are."""

    name: str
    shelf: int = 1
    _opened_by: str = PrivateAttr(default="")

    def __init__(self, **data: Any) -> None:
        configured.append("store")
        super().__init__(**data)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        assert not self._opened_by, "what one copy knows is its own"
        self._opened_by = context.run.run_id if context.run else ""


class Desk(CopiedByFields, dg.ConfigurableResource[Any]):
    """Uses the store."""

    store: Store
    clerk: str = "nobody"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    configured.clear()
    seen.clear()


@dg.op
def look(desk: Desk, store: Store) -> None:
    seen.append((desk.clerk, desk.store.name, desk.store.shelf, desk.store._opened_by, desk.store is store))


@dg.job
def looking() -> None:
    look()


def run(store: Any, desk: Desk, config: dict[str, Any] | None = None) -> str:
    job = dg.Definitions(jobs=[looking], resources={"store": store, "desk": desk}).get_job_def("looking")
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, run_config=config or {})
        assert result.success
        return result.run_id


def test_a_copy_with_the_same_values_is_not_configured_again() -> None:
    store = Store(name="north", shelf=3)
    desk = Desk(store=store, clerk="Ada")
    configured.clear()
    run_id = run(store, desk)
    assert configured == []
    assert seen == [("Ada", "north", 3, run_id, False)]
    assert store._opened_by == "", "a run sets its copies up"


def test_a_variable_has_the_value_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(name=dg.EnvVar("STORE"))
    desk = Desk(store=store, clerk=dg.EnvVar("CLERK"))
    for name in ("south", "STORE"):
        monkeypatch.setenv("STORE", name)
        monkeypatch.setenv("CLERK", f"of {name}")
        run(store, desk)
    assert [one[:2] for one in seen] == [("of south", "south"), ("of STORE", "STORE")]


def test_the_report_at_launch_holds() -> None:
    store = Store.configure_at_launch()
    run(store, Desk(store=store), {"resources": {"store": {"config": {"name": "west", "shelf": 7}}}})
    assert [one[:3] for one in seen] == [("nobody", "west", 7)]
