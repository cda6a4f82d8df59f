"""Small holes through which a token could get out, each on its own. No Nessie runs here."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator

import dagster as dg
import pytest
from pydantic import SecretStr

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import NessieUnauthorized, NessieUnavailable
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import RunBranch
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising

from .guard import EXPIRED, Guard, guarding, shows


@pytest.fixture
def guard() -> Iterator[Guard]:
    """One that lets nobody through, so that nothing needs to be behind it."""
    with guarding("http://127.0.0.1:9/api/v2") as found:
        yield found


def test_the_guard_escapes_what_it_echoes(guard: Guard) -> None:
    """Otherwise the next test proves nothing."""
    assert EXPIRED not in guard.refused(401, f"Bearer {EXPIRED}").decode()
    assert shows(f"you sent Bearer {EXPIRED}", EXPIRED)


def test_a_token_that_comes_back_escaped_is_not_passed_on(guard: Guard) -> None:
    with NessieClient(guard.uri, token=EXPIRED, retry=RetryPolicy(())) as client:
        with pytest.raises(NessieUnauthorized) as caught:
            client.config()
        assert guard.asked[-1].header == f"Bearer {EXPIRED}"
    error = caught.value
    assert "you sent" in str(error)  # what the guard says, so the token would have been beside it
    for form in (str(error), repr(error), repr(vars(error)), "".join(traceback.format_exception(error))):
        assert not shows(form, EXPIRED)
    assert not shows(pickle.dumps(error).decode("latin-1"), EXPIRED)
    assert "BRANCHLAKE_NESSIE_TOKEN" in str(error)


def test_a_token_in_the_query_of_the_address_is_not_printed() -> None:
    with raising(ConfigurationError, reason="not_api_v2") as caught:
        NessieClient(f"https://nessie.example.org/api/v2?access_token={EXPIRED}")
    assert not shows(str(caught.value), EXPIRED)
    assert "https://nessie.example.org/api/v2" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["kafka_password", "nessie_token", "spark_token", "s3_access_key_id", "s3_secret_access_key"]
)
@pytest.mark.parametrize("form", [str, SecretStr])
def test_a_secret_of_the_resource_is_hidden_from_dagster(name: str, form: Callable[[str], object]) -> None:
    """Dagster shows a resource's configuration in its UI and keeps it in snapshots."""
    resource = LakehouseResource(**{name: form(EXPIRED)})
    (_, snapshot) = next(
        iter(
            dg.Definitions(resources={"lake": resource})
            .get_repository_def()
            .get_top_level_resources()
            .items()
        )
    )
    told = f"{resource!r} {resource.model_dump()} {snapshot.configurable_resource_type if hasattr(snapshot, 'configurable_resource_type') else ''}"
    assert not shows(told, EXPIRED)
    secret = getattr(resource.effective(), name)
    assert secret.get_secret_value() == EXPIRED


def test_a_secret_may_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", EXPIRED)
    seen = []

    @dg.asset
    def reader(lake: LakehouseResource) -> None:
        secret = lake.effective().nessie_token
        seen.append((secret and secret.get_secret_value(), shows(repr(lake), EXPIRED)))

    lake = LakehouseResource(nessie_token=dg.EnvVar("SOME_TOKEN"))
    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize([reader], resources={"lake": lake}, instance=instance).success
    assert seen == [(EXPIRED, False)]


def test_every_secret_setting_is_known_to_be_one() -> None:
    secrets = {
        name
        for name in Settings.model_fields
        if name.endswith(("token", "password", "secret_access_key", "access_key_id"))
    }
    assert secrets == set(Settings.secret_names())


@pytest.mark.parametrize(
    ("refusal", "falls_back"),
    [(NessieUnauthorized("no"), False), (NessieUnavailable("away"), True)],
)
def test_a_refused_token_is_no_reason_to_write_to_main(
    refusal: Exception, falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 000 falls back when Nessie is down, not when it says no."""

    def refuse(*_: object, **__: object) -> None:
        raise refusal

    monkeypatch.setattr(NessieClient, "reference", refuse)
    with NessieClient("http://127.0.0.1:9/api/v2") as client:
        branch = RunBranch(
            lambda: client,
            "r",
            load_tags=dict,
            add_tags=lambda _: None,
            direct_main=True,
            warn=lambda _: None,
        )
        if falls_back:
            assert branch.open().unbranched
        else:
            with pytest.raises(NessieUnauthorized):
                branch.open()
