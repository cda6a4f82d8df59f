"""The sensor that alerts to blocked runs: against Dagster's run storage, and once behind the real gate."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication import unpublished_runs as module
from branchlake_dagster.publication.unpublished_runs import (
    AlertFailed,
    UnpublishedRun,
    on_blocked,
    webhook_alert,
)
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

PRICES = dg.AssetKey(["shop", "prices"])


@dg.asset(key=PRICES)
def prices() -> None: ...


@dataclass
class Watch:
    """An instance with the sensor's cursor and what it has alerted for."""

    instance: dg.DagsterInstance
    fails_for: set[str] = field(default_factory=set)
    alerts: list[UnpublishedRun] = field(default_factory=list)
    cursor: str | None = None

    def alert(self, run: UnpublishedRun) -> None:
        if run.run_id in self.fails_for:
            raise OSError("the receiver is away")
        self.alerts.append(run)

    def tick(self, **options: Any) -> None:
        context = dg.build_sensor_context(self.instance, cursor=self.cursor)
        on_blocked(self.alert, **options)(context)
        self.cursor = context.cursor

    def ended(self, **tags: str) -> str:
        """A run that ended with these of the publisher's tags; its id."""
        run_id = dg.materialize([prices], instance=self.instance).run_id
        mine = {RunTag.OPENED_BY: run_id, RunTag.BRANCH: f"run-{run_id}", RunTag.REASON: "check c failed"}
        self.instance.add_run_tags(run_id, mine | tags)
        return run_id

    def blocked(self) -> str:
        return self.ended(**{RunTag.STATUS: "blocked"})

    def alerted(self) -> Sequence[str]:
        ids = [run.run_id for run in self.alerts]
        self.alerts.clear()
        return ids


@pytest.fixture
def watch() -> Iterator[Watch]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Watch(instance)


def test_each_run_is_alerted_once(watch: Watch) -> None:
    watch.blocked()
    watch.tick()
    assert watch.alerted() == []  # it starts at the present
    first, second = watch.blocked(), watch.ended(**{RunTag.STATUS: "refused"})
    for state in ("published", "discarded", "pending"):
        watch.ended(**{RunTag.STATUS: state})
    watch.tick()
    assert watch.alerted() == [first, second]
    watch.tick()
    watch.instance.add_run_tags(first, {"looked": "at"})
    watch.tick()
    assert watch.alerted() == []


@pytest.mark.parametrize(
    "cursor", ["", "garbage", "[]", "{}", '{"start": 1, "since": 2}', '{"start": "2026-01-01", "since": "x"}']
)
def test_a_cursor_that_somebody_set_to_something_else_starts_anew(watch: Watch, cursor: str) -> None:
    watch.cursor = cursor
    watch.blocked()
    watch.tick()
    assert watch.alerted() == []
    run_id = watch.blocked()
    watch.tick()
    assert watch.alerted() == [run_id]


def test_a_run_that_is_parked_is_alerted_with_its_command(watch: Watch) -> None:
    watch.tick()
    run_id = watch.ended(**{RunTag.STATUS: "pending", RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})
    watch.tick()
    (run,) = watch.alerts
    assert (run.run_id, run.state, run.reasons) == (run_id, RunState.PARKED, ("check c failed",))
    assert f"branchlake set-aside retry {run_id[:8]}" in run.message


def test_only_the_wanted_states(watch: Watch) -> None:
    watch.tick()
    watch.blocked()
    refused = watch.ended(**{RunTag.STATUS: "refused"})
    watch.tick(states=["refused"])
    assert watch.alerted() == [refused]
    with pytest.raises(ConfigurationError):
        on_blocked(watch.alert, states=["published"])


def test_a_re_execution_with_inherited_tags_is_no_blocked_run(watch: Watch) -> None:
    watch.tick()
    parent = watch.blocked()
    watch.tick()
    watch.alerted()
    tags = watch.instance.get_run_by_id(parent).tags
    again = dg.materialize([prices], instance=watch.instance, tags=dict(tags)).run_id
    watch.tick()
    assert watch.alerted() == []  # its tags are its parent's
    watch.instance.add_run_tags(again, {RunTag.OPENED_BY: again})
    watch.tick()
    assert watch.alerted() == [again]  # the parent's alert is not its own


def test_an_alert_that_fails_is_tried_five_times_and_stops_no_other(watch: Watch) -> None:
    watch.tick()
    bad, good = watch.blocked(), watch.blocked()
    watch.fails_for = {bad}
    for attempt in range(5):
        with pytest.raises(AlertFailed):
            watch.tick()
        assert watch.alerted() == ([good] if attempt == 0 else [])
    watch.tick()
    assert watch.alerted() == []
    later = watch.blocked()
    watch.tick()
    assert watch.alerted() == [later]


def test_an_alert_that_failed_is_delivered_by_the_next_tick(watch: Watch) -> None:
    watch.tick()
    run_id = watch.blocked()
    watch.fails_for = {run_id}
    with pytest.raises(AlertFailed):
        watch.tick()
    watch.fails_for = set()
    watch.tick()
    assert watch.alerted() == [run_id]


def test_more_runs_than_a_page(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    watch.tick()
    runs = [watch.blocked() for _ in range(5)]
    watch.tick()
    assert watch.alerted() == runs


def test_a_tick_without_time_leaves_the_rest_to_the_next(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.tick()
    runs = [watch.blocked() for _ in range(3)]
    monkeypatch.setattr(module, "_TICK_S", -1.0)
    watch.tick()
    assert watch.alerted() == []
    monkeypatch.undo()
    watch.tick()
    assert watch.alerted() == runs


class _Receiver(BaseHTTPRequestHandler):
    answer = 200
    bodies: list[bytes] = []  # noqa: RUF012 - shared on purpose

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.answer)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[_Receiver]]]:
    class Receiver(_Receiver):
        bodies: list[bytes] = []  # noqa: RUF012

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/services/secret", Receiver
    server.shutdown()
    server.server_close()
    thread.join()


RUN = UnpublishedRun("4b4115ec", "job", "blocked", "Not published.", ("c failed",), {PRICES: {"mon", "tue"}})


def test_a_webhook_gets_text_and_values(
    receiver: tuple[str, type[_Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = receiver
    monkeypatch.setenv("HOOK", url)
    webhook_alert(dg.EnvVar("HOOK"))(RUN)
    (body,) = map(json.loads, server.bodies)
    assert body["text"] == "shop/prices (mon, tue): Not published. Run 4b4115ec"
    assert body["assets"] == {"shop/prices": ["mon", "tue"]}
    assert (body["state"], body["run_id"], body["reasons"]) == ("blocked", "4b4115ec", ["c failed"])


def test_a_webhook_that_refuses_or_is_away_is_an_error_without_its_secret(
    receiver: tuple[str, type[_Receiver]],
) -> None:
    url, server = receiver
    server.answer = 503
    for address in (url, "http://127.0.0.1:9/services/secret"):
        with pytest.raises(AlertFailed) as error:
            webhook_alert(address)(RUN)
        assert error.value.run_id == RUN.run_id
        assert "secret" not in str(error.value)
        assert error.value.__suppress_context__ or error.value.__context__ is None


def test_a_run_that_the_gate_blocks_is_described(lakehouse: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [-1]})

    @dg.asset_check(asset=t.key)
    def positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description="n > 0")

    with project(lakehouse, t, positive) as p:
        watch = Watch(p.instance)
        watch.tick()
        run_id = p.run()
        p.settle(run_id)
        watch.tick(dagster_url="http://127.0.0.1:3000/")
        (run,) = watch.alerts
    assert (run.run_id, run.state) == (run_id, "blocked")
    assert run.partitions == {t.key: {None}}
    assert len(run.reasons) == 1
    assert run_id[:8] in run.message  # the command that shows the rows
    assert run.url == f"http://127.0.0.1:3000/runs/{run_id}"
