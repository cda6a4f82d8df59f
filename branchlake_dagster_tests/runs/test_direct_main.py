"""`when_unavailable=direct_main`: what a run does when its branch cannot be made."""

import logging
import ssl
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import dagster as dg
import polars as pl
import pytest
import requests

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, NessieRefused, NessieUnavailable, NotNessie
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.nessie.transport import error_from_answer, error_from_exception, error_from_unreadable
from branchlake_dagster.runs.run_branch import RunBranch, run_branch_name
from branchlake_dagster.runs.run_tags import Retention, RunLocation, find_run_location
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)


class Refusing:
    """Nessie does everything but make branches."""

    def __init__(self) -> None:
        self.refuses = True
        self.asked = 0
        real = NessieClient.create_branch

        def create_branch(client: NessieClient, *args: Any, **kwargs: Any) -> Reference:
            self.asked += 1
            if self.refuses:
                raise NessieUnavailable("no branches today", status=503)
            return real(client, *args, **kwargs)

        self.patch = patch.object(NessieClient, "create_branch", create_branch)


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    found = Refusing()
    with found.patch:
        yield found


@pytest.fixture
def direct(lakehouse: Lakehouse) -> Lakehouse:
    return Lakehouse(lakehouse.settings.model_copy(update={"when_unavailable": "direct_main"}))


def two(namespace: str, refusing: Refusing) -> list[Any]:
    @dg.asset(key=[namespace, "first"], metadata=FREE)
    def first() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "second"], ins={"first": dg.AssetIn([namespace, "first"])}, metadata=FREE)
    def second(first: pl.DataFrame) -> pl.DataFrame:
        refusing.refuses = False  # Nessie is back; the run goes on where it began
        return first

    return [first, second]


def told(p: Project, run_id: str) -> dict[str, str]:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return {name: value for name, value in run.tags.items() if "branchlake" in name}


def test_by_default_a_run_fails(lakehouse: Lakehouse, namespace: str, refusing: Refusing) -> None:
    main = lakehouse.nessie.reference(MAIN).hash
    with project(lakehouse, *two(namespace, refusing)) as p:
        run_id = p.run(ok=False)
        p.failed_with(NessieUnavailable, "no branches today")
        assert told(p, run_id) == {}
    assert lakehouse.nessie.reference(MAIN).hash == main


def test_direct_main_writes_to_main_and_says_so(
    direct: Lakehouse, namespace: str, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    main = direct.nessie.reference(MAIN).hash
    with project(direct, *two(namespace, refusing)) as p:
        with caplog.at_level(logging.WARNING):
            run_id = p.run()
        assert p.rows(namespace, "second") == [{"n": 1}]
        assert told(p, run_id) == {
            RunTag.BRANCH: MAIN,
            RunTag.BASE_HASH: main,
            RunTag.OPENED_BY: run_id,
            RunTag.UNBRANCHED: "true",
            RunTag.VERDICT: "pending",
            RunTag.STATUS: "unbranched",
            RunTag.LAKE: direct.settings.lake_id,
            **Retention.from_settings(direct.settings).to_tags(),
        }
        assert run_branch_name(run_id) not in p.branches()
        warning = "Nessie unavailable, falling back to direct main writes"
        warned = [
            record.event_log_entry.user_message
            for record in p.instance.get_records_for_run(run_id).records
            if record.event_log_entry.level == logging.WARNING
        ]
        assert warned == [warning]
        for event in p.last.get_asset_materialization_events():
            metadata = event.materialization.metadata
            assert metadata["branchlake/unbranched"].value is True
            assert metadata["branchlake/branch"].value == MAIN
        summary = direct.catalog().load_table((namespace, "first")).current_snapshot().summary
        assert summary.additional_properties["branchlake.unbranched"] == "true"


def test_an_unbranched_run_whose_base_nobody_knows(
    direct: Lakehouse, namespace: str, refusing: Refusing
) -> None:
    failing = patch(
        "branchlake_dagster.runs.run_branch.ensure_main_has_commit", side_effect=NessieUnavailable("x")
    )
    with project(direct, *two(namespace, refusing)) as p, failing:
        run_id = p.run()
        place = find_run_location(told(p, run_id), run_id)
        assert place is not None
        assert (place.branch, place.base_hash, place.unbranched) == (MAIN, "", True)


def test_a_branch_that_can_be_made_is_made(direct: Lakehouse, namespace: str, refusing: Refusing) -> None:
    refusing.refuses = False
    with project(direct, *two(namespace, refusing)) as p:
        run_id = p.run()
        assert told(p, run_id)[RunTag.BRANCH] == run_branch_name(run_id)
        assert RunTag.UNBRANCHED not in told(p, run_id)


def test_a_fallback_that_is_not_the_first_follows_the_first(
    direct: Lakehouse, namespace: str, refusing: Refusing
) -> None:
    """Two processes of one run: the one that got a branch was faster than the one that got none."""
    stored: dict[str, str] = {}

    def process() -> RunBranch:
        return RunBranch(
            lambda: direct.nessie,
            namespace,
            load_tags=lambda: dict(stored),
            add_tags=stored.update,
            direct_main=True,
        )

    fast, slow = process(), process()
    real = slow._create_branch

    def create() -> Any:
        place = real()
        refusing.refuses = False
        fast.open()
        return place

    try:
        with patch.object(slow, "_create_branch", create):
            assert slow.open().branch == run_branch_name(namespace)
    finally:
        head = direct.nessie.reference(run_branch_name(namespace)).hash
        direct.nessie.delete_branch(run_branch_name(namespace), expected_hash=head)


class Answering:
    """A Nessie client whose every call ends in an error."""

    def __init__(self, error: NessieError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise self.error

        return call


def opened_with(error: NessieError) -> RunLocation:
    """The place of a run whose Nessie answers with `error`, and which may fall back to `main`."""
    client: Any = Answering(error)
    run = RunBranch(
        lambda: client, "r", load_tags=dict, add_tags=lambda _: None, direct_main=True, warn=lambda _: None
    )
    return run.open()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 422])
def test_a_nessie_that_answers_with_a_refusal_is_available(status: int) -> None:
    error = error_from_answer(status, {}, action="create branch r", changes=True, server="x")
    with pytest.raises(type(error)) as raised:
        opened_with(error)
    assert raised.value.status == status


def test_a_server_whose_certificate_is_not_trusted_is_available() -> None:
    cause = requests.exceptions.SSLError(ssl.SSLCertVerificationError("self-signed"))
    with pytest.raises(NessieRefused):
        opened_with(error_from_exception(cause, action="read main", changes=False, server="x"))


def test_an_answer_that_no_nessie_gives_is_no_reason_to_fall_back() -> None:
    with pytest.raises(NotNessie):
        opened_with(error_from_unreadable(200, "<html>", action="read main", changes=False, server="x"))


@pytest.mark.parametrize(
    "error",
    [
        error_from_answer(429, {}, action="read main", changes=False, server="x"),
        error_from_answer(503, {}, action="read main", changes=False, server="x"),
        error_from_answer(503, {}, action="create branch r", changes=True, server="x"),
        error_from_exception(requests.ConnectionError("reset"), action="create r", changes=True, server="x"),
        error_from_exception(requests.ReadTimeout("late"), action="read main", changes=False, server="x"),
    ],
)
def test_a_nessie_that_does_not_answer_is_unavailable(error: NessieError) -> None:
    place = opened_with(error)
    assert (place.branch, place.unbranched) == (MAIN, True)
