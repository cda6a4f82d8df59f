"""Define a lake's settings as typed fields of a Dagster resource."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, get_args

from dagster import ConfigurableResource, EnvVar
from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator

from branchlake_dagster.errors import ConfigurationError, SecretWithoutTls
from branchlake_dagster.internals.dagster import CopiedByFields
from branchlake_dagster.settings import VARIABLE_PREFIX, Settings, require_known_fields

EMBEDDED = "embedded"
"""The value of `nessie_uri` that selects the embedded server, whatever the environment sets."""


def _settings_field(name: str) -> Any:
    return Field(default=None, description=Settings.model_fields[name].description)


class _SecretVault:
    """The secrets of this process, by the placeholder that a configuration shows instead of the secret.

    Dagster shows a resource's configuration in its UI and stores it in snapshots. A run's process loads the
    code location again, and so fills its own vault.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._secrets: dict[str, str] = {}

    def hide(self, secret: str) -> str:
        with self._lock:
            if secret in self._secrets:
                return secret  # hidden already
            for name, hidden_secret in self._secrets.items():
                if hidden_secret == secret:
                    return name
            name = f"(hidden secret {len(self._secrets) + 1})"
            self._secrets[name] = secret
            return name

    def reveal(self, value: str) -> str:
        return self._secrets.get(value, value)


_vault = _SecretVault()


def _load_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings for these values and the current environment.

    The result is cached, because Dagster makes a dozen copies of a resource for each run and each copy asks.
    """
    environment = {
        name: value for name, value in os.environ.items() if name.upper().startswith(VARIABLE_PREFIX)
    }
    folders = (os.environ.get("HOME"), Path.cwd())  # `~` and a relative state folder depend on these
    return _resolve_settings(frozenset(values.items()), frozenset(environment.items()), folders)


@lru_cache(maxsize=16)
def _resolve_settings(
    values: frozenset[tuple[str, Any]],
    environment: frozenset[tuple[str, str]],  # noqa: ARG001 - Settings reads the environment itself
    folders: tuple[str | None, Path],  # noqa: ARG001
) -> Settings:
    return Settings(**dict(values))


def _is_variable(value: object) -> bool:
    return hasattr(value, "get_value")


def _require_variable_type(name: str, variable: object, annotation: Any) -> None:
    """Raise ConfigurationError if Dagster cannot set a field of this type from this kind of variable.

    `annotation` is that of a field of LakeConfig: a type, or None.
    """
    field_type = get_args(annotation)[0]
    if field_type is float:
        raise ConfigurationError(
            f"The field {name} is a decimal number, and Dagster has no variables for decimal numbers.",
            hint=f"Omit the field, and set {VARIABLE_PREFIX}{name.upper()} in the environment.",
            reason="variable_unsupported",
            subject=name,
        )
    if isinstance(variable, str) != (field_type is str):
        right_call = "dg.EnvVar" if field_type is str else "dg.EnvVar.int"
        raise ConfigurationError(
            f"The field {name} cannot be read from this kind of variable.",
            hint=f'Write {name}={right_call}("…").',
            reason="variable_unsupported",
            subject=name,
        )


def _read(name: str, value: Any) -> Any:
    """Return the value of a field, read from its variable if it is one; None if that is not set.

    A secret that is not set is the name of its variable: settings are valid only as a whole, and the secret
    may exist only where runs are executed.
    """
    if not _is_variable(value):
        return value
    variable_value = value.get_value()
    if variable_value is None and name in Settings.secret_names():
        return value.env_var_name
    return variable_value


class LakeConfig(CopiedByFields, ConfigurableResource[Any]):
    """The fields of `Settings`. An omitted field is read from the environment (`BRANCHLAKE_…`).

    Each field of text takes a value or a `dg.EnvVar`, and each field of whole numbers or truth values takes a
    value or a `dg.EnvVar.int`. Fields of decimal numbers take no variables: Dagster has none for them. A
    secret that is set as a value is hidden from Dagster at once.
    """

    state_dir: str | None = _settings_field("state_dir")
    nessie_uri: str | None = _settings_field("nessie_uri")
    nessie_token: str | None = _settings_field("nessie_token")
    nessie_verify_tls: str | None = _settings_field("nessie_verify_tls")
    nessie_port: int | None = _settings_field("nessie_port")
    guard_nessie: bool | None = _settings_field("guard_nessie")
    warehouse: str | None = _settings_field("warehouse")
    s3_endpoint: str | None = _settings_field("s3_endpoint")
    s3_region: str | None = _settings_field("s3_region")
    s3_access_key_id: str | None = _settings_field("s3_access_key_id")
    s3_secret_access_key: str | None = _settings_field("s3_secret_access_key")
    session_kind: str | None = _settings_field("session_kind")
    spark_remote: str | None = _settings_field("spark_remote")
    spark_token: str | None = _settings_field("spark_token")
    spark_master: str | None = _settings_field("spark_master")
    spark_driver_memory: str | None = _settings_field("spark_driver_memory")
    spark_java_options: str | None = _settings_field("spark_java_options")
    spark_port: int | None = _settings_field("spark_port")
    ivy_settings: str | None = _settings_field("ivy_settings")
    startup_timeout_s: float | None = _settings_field("startup_timeout_s")
    kafka_bootstrap: str | None = _settings_field("kafka_bootstrap")
    kafka_security: str | None = _settings_field("kafka_security")
    kafka_sasl_mechanism: str | None = _settings_field("kafka_sasl_mechanism")
    kafka_username: str | None = _settings_field("kafka_username")
    kafka_password: str | None = _settings_field("kafka_password")
    kafka_ca: str | None = _settings_field("kafka_ca")
    kafka_certificate: str | None = _settings_field("kafka_certificate")
    kafka_port: int | None = _settings_field("kafka_port")
    landing: str | None = _settings_field("landing")
    landing_keep_h: float | None = _settings_field("landing_keep_h")
    receivers: str | None = _settings_field("receivers")
    run_launcher: str | None = _settings_field("run_launcher")
    default_namespace: str | None = _settings_field("default_namespace")
    require_checks: bool | None = _settings_field("require_checks")
    widen_columns: bool | None = _settings_field("widen_columns")
    unpartitioned_checks: str | None = _settings_field("unpartitioned_checks")
    preview_rows: int | None = _settings_field("preview_rows")
    publish_interval_s: int | None = _settings_field("publish_interval_s")
    publish_in_run: bool | None = _settings_field("publish_in_run")
    publish_budget_s: float | None = _settings_field("publish_budget_s")
    recheck_timeout_min: float | None = _settings_field("recheck_timeout_min")
    reap_interval_min: int | None = _settings_field("reap_interval_min")
    orphan_grace_min: float | None = _settings_field("orphan_grace_min")
    orphan_max_age_h: float | None = _settings_field("orphan_max_age_h")
    heartbeat_interval_s: float | None = _settings_field("heartbeat_interval_s")
    watch_interval_s: int | None = _settings_field("watch_interval_s")
    exclusive_wait_s: float | None = _settings_field("exclusive_wait_s")
    keep_failed_hours: float | None = _settings_field("keep_failed_hours")
    discard_grace_h: float | None = _settings_field("discard_grace_h")
    orphan_file_grace_h: float | None = _settings_field("orphan_file_grace_h")
    history_horizon_days: float | None = _settings_field("history_horizon_days")
    snapshot_keep_count: int | None = _settings_field("snapshot_keep_count")
    snapshot_keep_days: float | None = _settings_field("snapshot_keep_days")
    undo_days: float | None = _settings_field("undo_days")
    position_days: float | None = _settings_field("position_days")
    deletion_delay_h: float | None = _settings_field("deletion_delay_h")
    collection_budget_s: float | None = _settings_field("collection_budget_s")
    when_unavailable: str | None = _settings_field("when_unavailable")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, values: Any) -> Any:
        # Dagster's resources ignore unknown fields. With `nessie_url`, a run once wrote to the embedded lake.
        if isinstance(values, Mapping):
            require_known_fields(values, cls.model_fields, cls.__name__)
            for name, value in values.items():
                # Fields that a subclass adds are not settings; Dagster validates their values.
                if _is_variable(value) and name in LakeConfig.model_fields:
                    _require_variable_type(name, value, LakeConfig.model_fields[name].annotation)
        return values

    @field_validator(*Settings.secret_names(), mode="before")
    @classmethod
    def _hide_secret(cls, value: Any) -> Any:
        if value is None or isinstance(value, EnvVar):
            return value
        return _vault.hide(value.get_secret_value() if hasattr(value, "get_secret_value") else str(value))

    @model_validator(mode="wrap")
    @classmethod
    def _validate_settings(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        config = build(values)
        # `build` makes a plain text of a variable's name. A resource that is nested in another one was
        # validated when it was made.
        if isinstance(values, Mapping):
            config._require_valid({name for name, value in values.items() if _is_variable(value)})
        return config

    def _require_valid(self, variables: Set[str]) -> None:
        """Raise pydantic's ValidationError if a value is invalid, apart from those of fields in `variables`.

        Such a field has a value only in the run's process. It could also change whether several fields fit
        together, so that is not validated if there are variables. Without variables, SecretWithoutTls can be
        raised too.
        """
        try:
            values = {name: value for name, value in self._field_values().items() if name not in variables}
            self._build_settings(values)
        except SecretWithoutTls:
            if not variables:
                raise
        except ValidationError as error:
            names = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
            if not variables or names - variables:
                raise

    def _field_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in LakeConfig.model_fields}
        return {name: value for name, value in values.items() if value is not None}

    def effective(self) -> Settings:
        """Return the effective settings: each field's value, or else that of the environment.

        Dagster resolves each `dg.EnvVar` when it sets up the resource. Before, the variable is read here. If
        it is not set, the field is omitted, or is a placeholder if it is a secret. Raises pydantic's
        ValidationError if a value is invalid.
        """
        values = {name: _read(name, value) for name, value in self._field_values().items()}
        return self._build_settings({name: value for name, value in values.items() if value is not None})

    @staticmethod
    def _build_settings(values: dict[str, Any]) -> Settings:
        for name in Settings.secret_names():
            if name in values:
                values[name] = _vault.reveal(values[name])
        if values.get("nessie_uri") == EMBEDDED:
            values["nessie_uri"] = None
        return _load_settings(values)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return a resource with these settings, also those that `settings` took from the environment.

        Dagster's UI then shows the effective Nessie and warehouse. Secrets are hidden from Dagster.
        """
        visible_values = settings.without_secrets()
        if "nessie_verify_tls" in visible_values:
            visible_values["nessie_verify_tls"] = str(visible_values["nessie_verify_tls"])
        secrets = {
            name: value for name in settings.secret_names() if (value := getattr(settings, name)) is not None
        }
        effective_values = {
            "state_dir": str(settings.state_dir),
            "nessie_uri": settings.nessie_uri or EMBEDDED,
            "warehouse": settings.warehouse_uri,
        }
        return cls(
            **{name: value for name, value in visible_values.items() if value is not None}
            | secrets
            | effective_values
        )
