"""One secured broker for all tests of the folder, and the settings that reach it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.ingest.secured.authority import Authority
from branchlake_dagster_tests.ingest.secured.broker import PASSWORD, USER, SecuredBroker
from branchlake_dagster_tests.suite.lakes import BROKER_JARS

Configure = Callable[..., Settings]


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The one that signed the broker's certificate, and another one."""
    folder = tmp_path_factory.mktemp("authorities")
    return Authority("ours", folder), Authority("theirs", folder)


@pytest.fixture(scope="module")
def ca(authorities: tuple[Authority, Authority]) -> Path:
    """A bundle with the right authority in it."""
    ours, theirs = authorities
    return ours.file("bundle.pem", theirs)


@pytest.fixture(scope="module")
def wrong_ca(authorities: tuple[Authority, Authority]) -> Path:
    return authorities[1].file("theirs.pem")


@pytest.fixture(scope="module")
def secured(
    authorities: tuple[Authority, Authority], state_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredBroker]:
    home = tmp_path_factory.mktemp("secured")
    if (state_dir / BROKER_JARS).is_dir():
        shutil.copytree(state_dir / BROKER_JARS, home / BROKER_JARS)
    ours = authorities[0]
    certificate = ours.signed("server.pem", "server.pem")
    broker = SecuredBroker(Settings(state_dir=home), certificate, ours.file("trusted.pem"))
    try:
        broker.up()
        yield broker
    finally:
        broker.down()


@pytest.fixture
def configure(secured: SecuredBroker, ca: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Sets the environment as a user would; what is named replaces what is right, None unsets it."""

    def configured(security: str, mechanism: str | None = None, /, **other: object) -> Settings:
        wanted: dict[str, object] = {"bootstrap": secured.address(security), "security": security, "ca": ca}
        if mechanism is not None:
            wanted |= {"sasl_mechanism": mechanism, "username": USER, "password": PASSWORD}
        for name, value in {**wanted, **other}.items():
            if value is None:
                monkeypatch.delenv(f"BRANCHLAKE_KAFKA_{name.upper()}", raising=False)
            else:
                monkeypatch.setenv(f"BRANCHLAKE_KAFKA_{name.upper()}", str(value))
        return Settings()

    return configured
