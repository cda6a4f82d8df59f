"""A finalizer may end a resource, and so ask Nessie for a head, at any time: also in a thread that holds a lock."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.lakehouse import lakehouse as lakehouse_module
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.errors import Breaker, RetryBudget
from branchlake_dagster.runs.run_branch import RunBranch
from branchlake_dagster.runs.run_tags import RunLocation
from branchlake_dagster.settings import Settings

UNBRANCHED = RunLocation("main", "", unbranched=True)


def ends(action: Callable[[], object]) -> bool:
    """Whether `action` ends in a thread of its own, instead of waiting for a lock that this thread holds."""
    thread = Thread(target=action, daemon=True)
    thread.start()
    thread.join(timeout=10)
    return not thread.is_alive()


def run_branch(**options: Any) -> RunBranch:
    return RunBranch(
        lambda: pytest.fail("asks Nessie"), "r", load_tags=dict, add_tags=lambda _: None, **options
    )


def test_a_finalizer_may_end_a_resource_while_its_thread_opens_the_branch() -> None:
    def inherit() -> RunLocation:
        branch.record_head()
        return UNBRANCHED

    branch = run_branch(inherit_location=inherit)
    assert ends(branch.open)
    assert branch.open() == UNBRANCHED


def test_a_finalizer_may_use_the_branch_while_its_thread_removes_earlier_rows() -> None:
    branch, calls = run_branch(inherit_location=lambda: UNBRANCHED), []

    def undo() -> None:
        branch.run_at_first_access("other", 1, lambda: calls.append("other"))
        calls.append("step")

    assert ends(lambda: branch.run_at_first_access("step", 2, undo))
    assert calls == ["other", "step"]


def test_a_finalizer_may_call_nessie_while_its_thread_counts_a_call() -> None:
    nested_calls: list[int] = []

    def clock() -> float:
        if not nested_calls:
            nested_calls.append(1)
            budget.record_call()
            budget.try_spend()
            breaker.record_result(failed=False)
            breaker.seconds_to_wait()
        return 0.0

    budget, breaker = RetryBudget(clock=clock), Breaker(clock=clock)
    for call in (
        budget.record_call,
        budget.try_spend,
        lambda: breaker.record_result(failed=False),
    ):
        nested_calls.clear()
        assert ends(call)


def test_a_finalizer_may_ask_for_the_client_while_its_thread_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lakehouse(Settings(state_dir=tmp_path))
    nested_calls: list[str] = []

    def call_nested(place: str) -> None:
        if place not in nested_calls:
            nested_calls.append(place)
            assert lake.nessie

    def find_endpoints(**_: object) -> Endpoints:
        call_nested("endpoints")
        return Endpoints(nessie_uri="http://127.0.0.1:1/api/v2", spark_remote=None, spark_token=None)

    created = lakehouse_module._create_client

    def create_client(*arguments: Any) -> Any:
        call_nested("client")
        return created(*arguments)

    monkeypatch.setattr(lake.servers, "endpoints", find_endpoints)
    monkeypatch.setattr(lakehouse_module, "_create_client", create_client)
    assert ends(lambda: lake.nessie)
    assert nested_calls == ["endpoints", "client"]
