"""A lake's settings as typed fields of a Dagster resource."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from dagster import ConfigurableResource, EnvVar
from pydantic import Field, field_validator, model_validator

from branchlake_dagster.internals.dagster import CopiedByFields
from branchlake_dagster.settings import PREFIX, Settings, require_known_fields

EMBEDDED = "embedded"
"""As `nessie_uri`: the embedded server, whatever the environment says."""


def _field(name: str) -> Any:
    return Field(default=None, description=Settings.model_fields[name].description)


class _Vault:
    """Secrets of this process by the names under which a configuration may show them.

    Dagster puts a resource's configuration into its UI and into snapshots. A run's process loads the code
    location anew and so fills a vault of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._secrets: dict[str, str] = {}

    def hide(self, secret: str) -> str:
        with self._lock:
            if secret in self._secrets:
                return secret  # hidden already
            for name, known in self._secrets.items():
                if known == secret:
                    return name
            name = f"(hidden secret {len(self._secrets) + 1})"
            self._secrets[name] = secret
            return name

    def reveal(self, value: str) -> str:
        return self._secrets.get(value, value)


_vault = _Vault()


def _settings(given: Mapping[str, Any]) -> Settings:
    """The settings for these values and today's environment.

    Dagster makes a dozen copies of a resource for each run, and each of them asks.
    """
    read = {name: value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
    folders = (os.environ.get("HOME"), Path.cwd())  # of `~`, and of a relative state folder
    return _resolved(frozenset(given.items()), frozenset(read.items()), folders)


@lru_cache(maxsize=16)
def _resolved(
    given: frozenset[tuple[str, Any]],
    read: frozenset[tuple[str, str]],  # noqa: ARG001 - Settings reads the environment itself
    folders: tuple[str | None, Path],  # noqa: ARG001
) -> Settings:
    return Settings(**dict(given))


class LakeConfig(CopiedByFields, ConfigurableResource[Any]):
    """The fields of `Settings`; what is left out comes from the environment (`BRANCHLAKE_…`).

    Each takes a value or a `dg.EnvVar`. A secret that is given as a value is hidden from Dagster at once.
    """

    state_dir: str | None = _field("state_dir")
    nessie_uri: str | None = _field("nessie_uri")
    nessie_token: str | None = _field("nessie_token")
    nessie_verify_tls: str | None = _field("nessie_verify_tls")
    nessie_port: int | None = _field("nessie_port")
    guard_nessie: bool | None = _field("guard_nessie")
    warehouse: str | None = _field("warehouse")
    s3_endpoint: str | None = _field("s3_endpoint")
    s3_region: str | None = _field("s3_region")
    s3_access_key_id: str | None = _field("s3_access_key_id")
    s3_secret_access_key: str | None = _field("s3_secret_access_key")
    session_kind: str | None = _field("session_kind")
    spark_remote: str | None = _field("spark_remote")
    spark_token: str | None = _field("spark_token")
    spark_master: str | None = _field("spark_master")
    spark_driver_memory: str | None = _field("spark_driver_memory")
    spark_port: int | None = _field("spark_port")
    ivy_settings: str | None = _field("ivy_settings")
    startup_timeout_s: float | None = _field("startup_timeout_s")
    kafka_bootstrap: str | None = _field("kafka_bootstrap")
    kafka_security: str | None = _field("kafka_security")
    kafka_sasl_mechanism: str | None = _field("kafka_sasl_mechanism")
    kafka_username: str | None = _field("kafka_username")
    kafka_password: str | None = _field("kafka_password")
    kafka_ca: str | None = _field("kafka_ca")
    kafka_certificate: str | None = _field("kafka_certificate")
    kafka_port: int | None = _field("kafka_port")
    landing: str | None = _field("landing")
    landing_keep_h: float | None = _field("landing_keep_h")
    receivers: str | None = _field("receivers")
    run_launcher: str | None = _field("run_launcher")
    default_namespace: str | None = _field("default_namespace")
    require_checks: bool | None = _field("require_checks")
    widen_columns: bool | None = _field("widen_columns")
    unpartitioned_checks: str | None = _field("unpartitioned_checks")
    preview_rows: int | None = _field("preview_rows")
    publish_interval_s: int | None = _field("publish_interval_s")
    publish_in_run: bool | None = _field("publish_in_run")
    publish_budget_s: float | None = _field("publish_budget_s")
    recheck_timeout_min: float | None = _field("recheck_timeout_min")
    reap_interval_min: int | None = _field("reap_interval_min")
    orphan_grace_min: float | None = _field("orphan_grace_min")
    orphan_max_age_h: float | None = _field("orphan_max_age_h")
    heartbeat_interval_s: float | None = _field("heartbeat_interval_s")
    watch_interval_s: int | None = _field("watch_interval_s")
    exclusive_wait_s: float | None = _field("exclusive_wait_s")
    keep_failed_hours: float | None = _field("keep_failed_hours")
    discard_grace_h: float | None = _field("discard_grace_h")
    when_unavailable: str | None = _field("when_unavailable")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        # Dagster's resources ignore a field that they do not have: nessie_url wrote to the embedded lake.
        if isinstance(given, Mapping):
            require_known_fields(given, cls.model_fields, cls.__name__)
        return given

    @field_validator(*Settings.secrets(), mode="before")
    @classmethod
    def _hidden(cls, value: Any) -> Any:
        if value is None or isinstance(value, EnvVar):
            return value
        return _vault.hide(value.get_secret_value() if hasattr(value, "get_secret_value") else str(value))

    @model_validator(mode="after")
    def _right(self) -> Self:
        # A variable has its value only where the run is. Dagster's are subclasses of `str` and `int`.
        if all(type(value) in (str, int, float, bool) for value in self._given().values()):
            self.effective()
        return self

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in LakeConfig.model_fields}
        return {name: value for name, value in values.items() if value is not None}

    def effective(self) -> Settings:
        """The settings that hold: the fields, else the environment. Raises pydantic's ValidationError."""
        given = self._given()
        for name in Settings.secrets():
            if name in given:
                given[name] = _vault.reveal(given[name])
        if given.get("nessie_uri") == EMBEDDED:
            given["nessie_uri"] = None
        return _settings(given)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """A resource with these settings; Dagster's UI then shows the effective Nessie and warehouse."""
        shown = settings.shown()
        if "nessie_verify_tls" in shown:
            shown["nessie_verify_tls"] = str(shown["nessie_verify_tls"])
        secrets = {
            name: value for name in settings.secrets() if (value := getattr(settings, name)) is not None
        }
        effective = {
            "state_dir": str(settings.state_dir),
            "nessie_uri": settings.nessie_uri or EMBEDDED,
            "warehouse": settings.warehouse_uri,
        }
        return cls(
            **{name: value for name, value in shown.items() if value is not None} | secrets | effective
        )
