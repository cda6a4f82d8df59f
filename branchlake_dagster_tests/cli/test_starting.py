"""The servers of a demo start beside it, and Spark's warm-up leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster.cli.server_starts import BackgroundServerStart
from branchlake_dagster.embedded.servers import EmbeddedServers, Endpoints
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark import session as warm_up

ANSWER = Endpoints("http://127.0.0.1:1/api/v2", "sc://localhost:1", None)


def test_what_keeps_the_servers_from_starting_is_raised_to_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Endpoints:
        raise ConfigurationError("There is no Java.")

    monkeypatch.setattr(EmbeddedServers, "endpoints", refused)
    starting = BackgroundServerStart(Settings(state_dir=tmp_path), say=lambda _: None)
    with pytest.raises(ConfigurationError):
        starting.wait()
    starting.finish()


@pytest.mark.parametrize("running", [True, False])
def test_only_a_fresh_server_is_warmed_up_and_its_failure_is_nobodys(
    running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = []

    def failing(*_: object) -> None:
        warmed.append(1)
        raise RuntimeError("no room")

    monkeypatch.setattr(EmbeddedServers, "find_endpoints", lambda _: ANSWER if running else None)
    monkeypatch.setattr(EmbeddedServers, "endpoints", lambda _: ANSWER)
    monkeypatch.setattr(warm_up, "warm_up", failing)
    starting = BackgroundServerStart(Settings(state_dir=tmp_path), say=lambda _: None)
    starting.wait()
    starting.finish()
    assert warmed == ([] if running else [1])


@pytest.mark.spark
def test_a_warm_up_leaves_nothing(lakehouse: Lakehouse) -> None:
    head = lakehouse.nessie.reference(MAIN).hash
    # As of a server of ours: the one of the tests may be another process's.
    settings = lakehouse.settings.model_copy(update={"spark_remote": None})
    warm_up.warm_up(settings, lakehouse.endpoints())
    assert not (settings.state_dir / "spark" / "warming").exists()
    assert lakehouse.nessie.reference(MAIN).hash == head
