"""The settings of a lake: its servers, its warehouse, and the behavior of branches, checks and publication.

The environment variable of a field is `BRANCHLAKE_<FIELD>` (`BRANCHLAKE_NESSIE_URI=…`). If `nessie_uri` and
`spark_remote` are unset, embedded servers start on demand and keep their files in `state_dir`.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlparse

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from branchlake_dagster.errors import ConfigurationError, SecretWithoutTls

VARIABLE_PREFIX = "BRANCHLAKE_"
_PIPELINE_VARIABLES = (
    f"{VARIABLE_PREFIX}GP_DIR",
    f"{VARIABLE_PREFIX}DATA_MODE",
    f"{VARIABLE_PREFIX}KEEP_RECORDS",
    f"{VARIABLE_PREFIX}GP_PULL",
    f"{VARIABLE_PREFIX}LIVE_SENSORS",
    f"{VARIABLE_PREFIX}SENSORS",
)
"""Variables that only the space pipeline reads."""
_HEAP_SIZE = re.compile(r"([1-9][0-9]*)([kmgt]?)", re.ASCII | re.IGNORECASE)
_HEAP_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MIN_HEAP_BYTES = 450 << 20
"""Spark does not start with less."""
_TEST_PREFIX = f"{VARIABLE_PREFIX}TEST_"

_S3_KEYS = ("s3.access-key-id", "s3.secret-access-key")
_DURABLE_FILE_IO = "branchlake_dagster.catalog.stored_files.DurableFileIO"
"""The Python path of the FileIO class for local files. PyIceberg imports the class, also on Spark workers."""

_UNITS_S = {"s": 1, "min": 60, "h": 3600, "hours": 3600, "days": 86400}
"""The last part of a duration's name -> its unit in seconds."""
_MAX_DURATION_DAYS = 36_525
"""The longest duration, a century. With a longer one, a time in the past or future may not exist."""

_SECRETS_FOR_SPARK = {
    "nessie_token": "Nessie's token (BRANCHLAKE_NESSIE_TOKEN)",
    "kafka_password": "Kafka's password (BRANCHLAKE_KAFKA_PASSWORD)",
    "kafka_certificate": "the private key for Kafka (BRANCHLAKE_KAFKA_CERTIFICATE)",
}
"""Secret settings that sessions and queries send to Spark -> their descriptions for messages."""


def require_tls(remote: str, secrets: Sequence[str], *, token: bool = False) -> None:
    """Raise SecretWithoutTls if `secrets` would reach the Spark Connect server `remote` without encryption.

    pyspark encrypts a connection if the URL has `use_ssl=true`, and always if it has a token. A loopback
    address needs no encryption, because nothing leaves the machine.

    Args:
        remote: The URL, `sc://host:port/;name=value;…`.
        secrets: Descriptions of the secrets, never their values.
        token: Whether pyspark gets a token by other means than the URL.
    """
    url = urlparse(f"http{remote[2:]}")  # as pyspark reads it
    parameters = dict(parameter.partition("=")[::2] for parameter in url.params.split(";"))
    encrypted = parameters.get("use_ssl", "").lower() == "true" or "token" in parameters or token
    if encrypted or not secrets or _is_loopback(url.hostname or ""):
        return
    raise SecretWithoutTls(
        f"The connection to the Spark Connect server at {url.netloc.rpartition('@')[2]} has no TLS,"
        f" so it would send {' and '.join(secrets)} without encryption.",
        secrets=secrets,
        hint="Put a TLS proxy in front of the server and set"
        " BRANCHLAKE_SPARK_REMOTE=sc://host:port/;use_ssl=true, or connect to a loopback address, for example"
        " through an SSH tunnel (docs/deployment.md).",
    )


def require_known_fields(field_names: Iterable[str], valid_names: Collection[str], owner: str) -> None:
    """Raise ConfigurationError for a name in `field_names` that is not in `valid_names`.

    `owner` is the class that has the fields. The hint suggests the most similar valid name.
    """
    for name in field_names:
        if name not in valid_names:
            similar_names = difflib.get_close_matches(name, valid_names, n=1, cutoff=0.5)
            suggestion = f"Did you mean {similar_names[0]}? " if similar_names else ""
            raise ConfigurationError(
                f"{owner} has no field {name}.",
                hint=f"{suggestion}See docs/settings.md for the fields.",
                reason="unknown_field",
                subject=name,
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_BROKER = re.compile(r"(?:\w+://)?(?:\[[^\s/,\[\]]+\]|[^\s/:,\[\]]+)(?::[0-9]{1,5})?")
"""A broker's address. librdkafka also accepts a security protocol before it, and has a default port."""


def _require_url(value: str, schemes: Sequence[str]) -> None:
    """Raise ValueError, without `value`, if it is not a URL with one of the schemes and a host."""
    example = f"{schemes[0]}://host:port"
    if value.partition("://")[0].lower() not in schemes or "://" not in value:
        raise ValueError(f"the address has no scheme {' or '.join(schemes)}; write {example}")
    if re.search(r"\s", value):
        raise ValueError(f"the address contains white space; write {example}")
    try:
        url = urlparse(value)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:  # the port is not a number, or is too large
        has_host = False
    if not has_host:
        raise ValueError(f"the address has no valid host and port; write {example}")


class Settings(BaseSettings):
    """The settings of a lake. Names of durations end in their unit: `_s`, `_min`, `_h` or `_hours`.

    The environment variable of a field is `BRANCHLAKE_<FIELD>`. Arguments of the class have precedence over
    the environment.

    Examples:
        .. code-block:: python

            from branchlake_dagster import Settings

            settings = Settings(nessie_uri="https://nessie.example.com/api/v2", warehouse="s3://lake/tables")
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    state_dir: Path = Field(
        Path(".branchlake"), description="Folder of the embedded lakehouse: data, logs, process records."
    )

    nessie_uri: str | None = Field(None, description="Nessie REST v2 endpoint; unset: embedded server.")
    nessie_token: SecretStr | None = Field(None, description="Bearer token for Nessie.")
    nessie_verify_tls: bool | str = Field(True, description="Verify TLS; or the path of a CA bundle.")
    nessie_port: int = Field(0, ge=0, le=65535, description="Port of the embedded Nessie; 0: any free one.")

    guard_nessie: bool = Field(
        True,
        description="Let the embedded Nessie require a token that other accounts of the machine do not have.",
    )

    warehouse: str | None = Field(
        None, description="Root of the Iceberg tables (file://… or s3://…); unset: a folder in state_dir."
    )
    s3_endpoint: str | None = Field(None, description="S3-compatible endpoint; unset: AWS.")
    s3_region: str = Field("us-east-1", description="S3 region.")
    s3_access_key_id: SecretStr | None = Field(None, description="S3 access key; unset: the default chain.")
    s3_secret_access_key: SecretStr | None = Field(None, description="S3 secret key.")

    session_kind: Literal["connect", "classic"] = Field(
        "connect", description="Spark Connect, or a classic Spark session in the step's own process."
    )
    spark_remote: str | None = Field(None, description="Spark Connect URL (sc://host:port); unset: embedded.")
    spark_token: SecretStr | None = Field(None, description="Token for a remote Spark Connect server.")
    spark_master: str = Field(
        "local[*]", description="Master of a classic session and of the embedded server."
    )
    spark_driver_memory: str = Field(
        "3g",
        description="Heap of the embedded Spark server, or of a classic session: a number with k, m, g or t.",
    )
    spark_java_options: str | None = Field(
        None, description="More options for the JVM of the embedded Spark server, such as -XX:+UseParallelGC."
    )
    spark_port: int = Field(0, ge=0, le=65535, description="Port of embedded Spark Connect; 0: any free one.")

    ivy_settings: Path | None = Field(
        None, description="Your ivysettings.xml (mirrors, proxies); unset: Ivy's."
    )
    startup_timeout_s: float = Field(90.0, gt=0, description="How long an embedded server may take to start.")

    kafka_bootstrap: str | None = Field(None, description="Kafka's brokers (host:port,…), for ingestion.")
    kafka_security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="Kafka's security.protocol."
    )
    kafka_sasl_mechanism: str | None = Field(
        None, description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, if Kafka requires SASL."
    )
    kafka_username: str | None = Field(None, description="User name for Kafka's SASL.")
    kafka_password: SecretStr | None = Field(None, description="Password for Kafka's SASL.")
    kafka_ca: Path | None = Field(
        None, description="PEM file with the certificates to verify Kafka's brokers."
    )
    kafka_certificate: Path | None = Field(
        None, description="PEM file with the private key and certificates of this Kafka client."
    )
    kafka_port: int = Field(
        0, ge=0, le=65535, description="Port of the embedded Kafka broker; 0: any free one."
    )

    landing: Path | None = Field(
        None, description="Folder of landing files, for ingestion without Kafka; unset: landing in state_dir."
    )
    landing_keep_h: float = Field(
        24.0,
        ge=0,
        description="Minimum hours that landing files are kept, even if their records are on main.",
    )
    receivers: str | None = Field(
        None, description="Monitors of receivers (http://host:9464,…). The topics' assets show their counts."
    )

    run_launcher: Literal["warm", "dagster"] = Field(
        "warm",
        description="How WarmRunLauncher starts runs: forked from a warm process, or like Dagster's own"
        " launcher.",
    )

    default_namespace: str = Field(
        "lake", pattern=r"^\w+$", description="Iceberg namespace of assets without a key prefix."
    )
    widen_columns: bool = Field(
        True,
        description="Let a frame change its table's columns without loss (int to long, float to double,"
        " more decimal digits, new struct fields); false: only add nullable columns.",
    )
    require_checks: bool = Field(True, description="Block a run that wrote an asset without a check.")
    unpartitioned_checks: Literal["warn", "error", "allow"] = Field(
        "warn",
        description="What happens if a partitioned asset has a check without partitions_def, which reads the"
        " whole table on every run: loading the definitions warns, fails, or accepts it.",
    )
    preview_rows: int = Field(
        5, ge=0, le=50, description="Rows of each materialization that Dagster's pages show; 0: none."
    )
    publish_interval_s: int = Field(
        3,
        ge=1,
        description="Minimum seconds between ticks of the publication sensor (Dagster starts ticks every 5).",
    )
    publish_in_run: bool = Field(
        True, description="Let a run publish itself at its end if no other publisher is active."
    )
    publish_budget_s: float = Field(
        30.0, gt=0, description="Longest tick of the publication sensor. Other runs wait for the next tick."
    )
    recheck_timeout_min: float = Field(
        60.0,
        gt=0,
        description="Minutes after which a run that checks a rebased table is abandoned and launched again.",
    )
    reap_interval_min: int = Field(60, ge=1, le=60, description="Minutes between runs of the reaper.")
    orphan_grace_min: float = Field(
        60.0,
        gt=0,
        description="Minutes without a commit after which the branch of an unknown run is discarded.",
    )
    orphan_max_age_h: float = Field(
        6.0,
        gt=0,
        description="Hours without a sign of life after which the branch of an active run that never sent"
        " a heartbeat is discarded.",
    )

    heartbeat_interval_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds between a writer's heartbeats. After three missed ones the writer is"
        " suspected dead.",
    )
    watch_interval_s: int = Field(
        30,
        ge=1,
        description="Seconds between inspections of silent writers. A writer is dead after three"
        " inspections.",
    )
    exclusive_wait_s: float = Field(
        600.0,
        ge=0,
        description="Seconds that a run waits for another run that writes the same exclusive assets.",
    )
    keep_failed_hours: float = Field(
        0.0,
        ge=0,
        description="Hours that the branch of a failed, blocked or refused run is kept for debugging.",
    )
    discard_grace_h: float = Field(
        24.0, gt=0, description="Hours after which the data files of a discarded branch are deleted."
    )
    orphan_file_grace_h: float = Field(
        168.0,
        ge=24,
        description="Hours for which a file that no reference can read is kept after it was written.",
    )
    history_horizon_days: float = Field(
        30.0, gt=0, description="Days for which earlier commits of branches and tags stay readable."
    )
    snapshot_keep_count: int = Field(
        100, ge=1, description="Newest snapshots of a table that an expiry keeps, whatever their age."
    )
    snapshot_keep_days: float = Field(
        7.0, ge=0, description="Days for which an expiry keeps all snapshots of a table."
    )
    undo_days: float = Field(
        7.0,
        ge=0,
        description="Days for which an expiry keeps what the undo of a publication needs. Without a value: 7,"
        " or the history horizon if that is shorter.",
    )
    position_days: float = Field(
        30.0,
        ge=0,
        description="Days for which an expiry keeps snapshots that a consumer has not consumed.",
    )
    deletion_delay_h: float = Field(
        24.0, ge=24, description="Hours between the plan to delete a file and its deletion."
    )
    collection_budget_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds after which a garbage collection lists and deletes no further files. The next"
        " one continues.",
    )
    when_unavailable: Literal["fail", "direct_main"] = Field(
        "fail", description="What a run does if its branch cannot be created: fail, or write to main."
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_unread_variables(cls, data: Any) -> Any:
        # A run with a misspelled BRANCHLAKE_NESSIE_URI once wrote to another lake.
        names = [f"{VARIABLE_PREFIX}{name.upper()}" for name in cls.model_fields]
        for name in sorted(os.environ):
            if not name.upper().startswith(VARIABLE_PREFIX) or name.upper().startswith(_TEST_PREFIX):
                continue
            if name.upper() not in (*names, *_PIPELINE_VARIABLES):
                similar_names = difflib.get_close_matches(
                    name.upper(), (*names, *_PIPELINE_VARIABLES), n=1, cutoff=0.5
                )
                suggestion = f"Did you mean {similar_names[0]}? " if similar_names else ""
                raise ConfigurationError(
                    f"Nothing reads the environment variable {name}.",
                    hint=f"{suggestion}Unset it, or see docs/settings.md for the variables.",
                    reason="unknown_variable",
                    subject=name,
                )
        if isinstance(data, Mapping):
            require_known_fields(data, cls.model_fields, cls.__name__)
        return data

    @field_validator("*")
    @classmethod
    def _require_short_duration(cls, value: Any, info: ValidationInfo) -> Any:
        unit_s = _UNITS_S.get((info.field_name or "").rpartition("_")[2])
        if unit_s is None or not isinstance(value, (int, float)):
            return value
        if value * unit_s > _MAX_DURATION_DAYS * 86400:
            most = _MAX_DURATION_DAYS * 86400 // unit_s
            raise ValueError(f"{value:g} is longer than a century; use {most:,} or less")
        return value

    @field_validator(
        "state_dir",
        "landing",
        "ivy_settings",
        "kafka_ca",
        "kafka_certificate",
        "nessie_uri",
        "spark_remote",
        "warehouse",
        mode="before",
    )
    @classmethod
    def _refuse_empty_text(cls, value: object) -> object:
        # An empty path means the working directory, and an empty address names nothing. Nobody intends that.
        if value == "":
            raise ValueError("the value is empty; unset it, or write a path or address")
        return value

    @field_validator("nessie_uri", "spark_remote", "s3_endpoint")
    @classmethod
    def _require_address(cls, value: str | None, info: ValidationInfo) -> str | None:
        # Without a scheme, the first request would fail with an error of the HTTP library. An empty endpoint,
        # which deployments pass, is that of AWS.
        if value:
            _require_url(value, ("sc",) if info.field_name == "spark_remote" else ("http", "https"))
        return value

    @field_validator("receivers")
    @classmethod
    def _require_monitor_addresses(cls, value: str | None) -> str | None:
        for address in (value or "").split(","):
            if address.strip():
                _require_url(address.strip(), ("http", "https"))
        return value

    @field_validator("kafka_bootstrap")
    @classmethod
    def _require_brokers(cls, value: str | None) -> str | None:
        # Kafka's clients skip empty parts of the list.
        for broker in (value or "").split(","):
            if broker.strip() and not _BROKER.fullmatch(broker.strip()):
                raise ValueError(f"{broker.strip()!r} is not the address of a broker; write host:port")
        return value

    @field_validator("state_dir")
    @classmethod
    def _make_absolute(cls, value: Path) -> Path:
        # Dagster starts run workers with their own working directory.
        return value.expanduser().absolute()

    @field_validator("landing")
    @classmethod
    def _make_landing_absolute(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @field_validator("warehouse")
    @classmethod
    def _require_scheme(cls, value: str | None) -> str | None:
        # Spark, PyIceberg and Nessie resolve a path without a scheme in different ways.
        if value is not None and value != value.strip():
            raise ValueError(f"{value!r} begins or ends with a space")
        if value is None or re.match(r"file:///|(?!file:)[a-z][a-z0-9+.-]*://[^/]", value):
            return value
        path = value.removeprefix("file:").lstrip("/")
        raise ValueError(f"{value!r} has no scheme; write file:///{path}, or s3://bucket/folder")

    @model_validator(mode="after")
    def _require_whole_path(self) -> Self:
        # PyIceberg parses locations as URLs: it would write all files to the path before such a character.
        if found := re.search(r"[?#\t\r\n]", self.warehouse_uri):
            name = "warehouse" if self.warehouse is not None else "state_dir"
            raise ValueError(
                f"{name} contains {found.group()!r}, which a location of a table cannot contain; choose"
                " another folder"
            )
        return self

    @field_validator("nessie_verify_tls", mode="before")
    @classmethod
    def _parse_boolean_or_path(cls, value: object) -> object:
        # An environment variable is always text, and "false" must not become the path of a CA bundle.
        return {"true": True, "false": False}.get(str(value).lower(), value)

    @field_validator("spark_driver_memory")
    @classmethod
    def _require_heap_size(cls, value: str) -> str:
        # Spark's launcher passes the text to Java as it is. Java knows no unit "gb".
        size = value.strip()
        match = _HEAP_SIZE.fullmatch(size)
        if match is None:
            raise ValueError(
                f"{value!r} is not a heap size of Java; write a number of bytes, or with k, m, g or t: 3g"
            )
        if int(match[1]) * _HEAP_UNITS[match[2].lower()] < _MIN_HEAP_BYTES:
            raise ValueError(f"{value!r} is less than the 450m that Spark needs; use 512m or more")
        return size

    @field_validator("spark_java_options")
    @classmethod
    def _require_java_options(cls, value: str | None) -> str | None:
        options = shlex.split(value or "")  # raises ValueError, for example for a quote that is not closed
        if any("-Xmx" in option for option in options):  # Spark's launcher refuses them
            raise ValueError("-Xmx cannot be set here; set the heap with BRANCHLAKE_SPARK_DRIVER_MEMORY")
        return value

    @field_validator("reap_interval_min")
    @classmethod
    def _require_divisor_of_60(cls, value: int) -> int:
        if 60 % value:
            raise ValueError(
                f"{value} does not divide an hour; use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60"
            )
        return value

    @model_validator(mode="after")
    def _require_consistent_retention(self) -> Self:
        # A file must outlive every run that may still need it, and every state that undo or a retry reads.
        # The defaults follow the other settings: see `orphan_file_grace` and `history_horizon`.
        if (
            "orphan_file_grace_h" in self.model_fields_set
            and self.orphan_file_grace_h < self.orphan_max_age_h
        ):
            raise ValueError(
                f"orphan_file_grace_h ({self.orphan_file_grace_h:g}) is shorter than orphan_max_age_h"
                f" ({self.orphan_max_age_h:g}), the time for which a run without heartbeat may write"
            )
        if "history_horizon_days" not in self.model_fields_set:
            return self
        horizon_h = self.history_horizon_days * 24
        needed_h = self.keep_failed_hours + self.discard_grace_h
        if horizon_h < needed_h:
            raise ValueError(
                f"history_horizon_days ({self.history_horizon_days:g}) is shorter than keep_failed_hours and"
                f" discard_grace_h together ({needed_h:g} hours), for which failed runs can be continued"
            )
        if timedelta(hours=horizon_h) < self.orphan_file_grace:
            raise ValueError(
                f"history_horizon_days ({self.history_horizon_days:g}) is shorter than orphan_file_grace_h"
                f" ({self.orphan_file_grace.total_seconds() / 3600:g} hours)"
            )
        if "undo_days" in self.model_fields_set and self.history_horizon_days < self.undo_days:
            raise ValueError(
                f"history_horizon_days ({self.history_horizon_days:g}) is shorter than undo_days"
                f" ({self.undo_days:g}), for which publications can be undone"
            )
        return self

    @model_validator(mode="after")
    def _require_tls_for_secrets(self) -> Self:
        self.require_tls_to_spark()
        return self

    def require_tls_to_spark(self, *other_secrets: str) -> None:
        """Raise SecretWithoutTls if secrets would reach a remote Spark Connect server without encryption.

        These are the secrets of the settings, and `other_secrets`: descriptions of further secrets, never
        their values.
        """
        if self.session_kind == "connect" and self.spark_remote is not None:
            secrets = (*self._describe_spark_secrets(), *other_secrets)
            require_tls(self.spark_remote, secrets, token=self.spark_token is not None)

    def _describe_spark_secrets(self) -> list[str]:
        return [
            description for name, description in _SECRETS_FOR_SPARK.items() if getattr(self, name) is not None
        ]

    @classmethod
    def secret_names(cls) -> tuple[str, ...]:
        """Return the names of the settings whose values must not be shown."""
        return tuple(name for name, field in cls.model_fields.items() if field.annotation == SecretStr | None)

    def without_secrets(self) -> dict[str, Any]:
        """Return the fields that were set, except secrets, as keyword arguments of `LakehouseResource`."""
        return self.model_dump(exclude_unset=True, exclude=set(self.secret_names()), mode="json")

    @property
    def warehouse_uri(self) -> str:
        """The URI of the warehouse, the root of all tables. Unset: the folder `warehouse` in `state_dir`."""
        return self.warehouse or f"file://{self.state_dir}/warehouse"

    @property
    def orphan_file_grace(self) -> timedelta:
        """How long a file that no reference can read is kept after it was written.

        This is `orphan_file_grace_h`. If that is not set, it is the longer of the default and
        `orphan_max_age_h`.
        """
        hours = self.orphan_file_grace_h
        if "orphan_file_grace_h" not in self.model_fields_set:
            hours = max(hours, self.orphan_max_age_h)
        return timedelta(hours=hours)

    @property
    def history_horizon(self) -> timedelta:
        """How long earlier commits stay readable.

        This is `history_horizon_days`. If that is not set, it is the longest of the default, `undo_days`,
        `orphan_file_grace`, and the sum of `keep_failed_hours` and `discard_grace_h`.
        """
        horizon = timedelta(days=self.history_horizon_days)
        if "history_horizon_days" in self.model_fields_set:
            return horizon
        failed_runs = timedelta(hours=self.keep_failed_hours + self.discard_grace_h)
        return max(horizon, failed_runs, self.orphan_file_grace, timedelta(days=self.undo_days))

    @property
    def lake_id(self) -> str:
        """The identity of the lake, as 16 hex digits: a hash of its Nessie and warehouse addresses."""
        return hashlib.sha256(f"{self.nessie_uri} {self.warehouse_uri}".encode()).hexdigest()[:16]

    @property
    def landing_folder(self) -> Path:
        """The folder of landing files: `landing`, or the folder `landing` in `state_dir` if it is unset."""
        return self.landing or self.state_dir / "landing"

    @property
    def receiver_monitors(self) -> tuple[str, ...]:
        """The addresses of the receivers' monitors in `receivers`; empty if it is unset."""
        return tuple(address.strip() for address in (self.receivers or "").split(",") if address.strip())

    @property
    def embedded_warehouse(self) -> bool:
        """Whether the warehouse is the folder `warehouse` in `state_dir`."""
        return self.warehouse_uri == f"file://{self.state_dir}/warehouse"

    @property
    def embedded_nessie(self) -> bool:
        """Whether branchlake starts Nessie itself."""
        return self.nessie_uri is None

    @property
    def embedded_spark(self) -> bool:
        """Whether branchlake starts a Spark Connect server itself."""
        return self.session_kind == "connect" and self.spark_remote is None

    def file_io_properties(self) -> dict[str, str]:
        """Return PyIceberg's FileIO properties for the warehouse. Never log them: they may contain S3 keys.

        For a warehouse that is neither local nor in S3, the result is empty.
        """
        if self.warehouse_uri.startswith("file:"):
            return {"py-io-impl": _DURABLE_FILE_IO}
        properties = {"s3.region": self.s3_region}
        if self.s3_endpoint:
            properties |= {"s3.endpoint": self.s3_endpoint, "s3.force-virtual-addressing": "false"}
        if self.s3_access_key_id and self.s3_secret_access_key:
            access_key, secret_key = _S3_KEYS
            properties[access_key] = self.s3_access_key_id.get_secret_value()
            properties[secret_key] = self.s3_secret_access_key.get_secret_value()
        return properties if self.warehouse_uri.startswith("s3") else {}

    def worker_file_io_properties(self) -> dict[str, str]:
        """Return the FileIO properties that Spark's Python workers get inside the plan of a query.

        If Spark is remote, the S3 keys are omitted, because Spark keeps the plan and `sc://` may not be
        encrypted. Remote workers take the keys from their own environment (`AWS_ACCESS_KEY_ID`, …).
        """
        properties = self.file_io_properties()
        if self.spark_remote is None:
            return properties
        return {name: value for name, value in properties.items() if name not in _S3_KEYS}
