"""One settings object: the embedded lakehouse or remote servers, every knob with its unit.

Each field is read from the environment as `BRANCHLAKE_<FIELD>` (`BRANCHLAKE_NESSIE_URI=…`). Without
`nessie_uri` and `spark_remote` the embedded servers are started on demand inside `state_dir`.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlparse

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from branchlake_dagster.errors import ConfigurationError, SecretWithoutTls

VARIABLE_PREFIX = "BRANCHLAKE_"
_PIPELINE_VARIABLES = (
    f"{VARIABLE_PREFIX}GP_DIR",
    f"{VARIABLE_PREFIX}GP_PULL",
    f"{VARIABLE_PREFIX}LIVE_SENSORS",
)
"""Read by the space pipeline."""
_TEST_PREFIX = f"{VARIABLE_PREFIX}TEST_"

_S3_KEYS = ("s3.access-key-id", "s3.secret-access-key")
_DURABLE_FILE_IO = "branchlake_dagster.catalog.stored_files.DurableFileIO"
"""By name: PyIceberg imports it where a file is written, on Spark's workers too."""

_SECRETS_FOR_SPARK = {
    "nessie_token": "Nessie's token (BRANCHLAKE_NESSIE_TOKEN)",
    "kafka_password": "Kafka's password (BRANCHLAKE_KAFKA_PASSWORD)",
    "kafka_certificate": "the private key for Kafka (BRANCHLAKE_KAFKA_CERTIFICATE)",
}
"""Settings that sessions and queries carry to Spark."""


def require_tls(remote: str, secrets: Sequence[str], *, token: bool = False) -> None:
    """Raise SecretWithoutTls if `secrets` would go in clear to the Spark Connect server `remote`.

    `secrets` are descriptions, never values. `remote` is `sc://host:port/;name=value;…`. pyspark encrypts
    with `use_ssl=true`, and wherever it has a token: in `remote`, or later (`token`). A loopback host needs
    no encryption: nothing leaves the machine.
    """
    url = urlparse(f"http{remote[2:]}")  # as pyspark reads it
    parameters = dict(parameter.partition("=")[::2] for parameter in url.params.split(";"))
    encrypted = parameters.get("use_ssl", "").lower() == "true" or "token" in parameters or token
    if encrypted or not secrets or _is_loopback(url.hostname or ""):
        return
    raise SecretWithoutTls(
        f"The Spark Connect server at {url.netloc.rpartition('@')[2]} is reached without TLS, which would"
        f" send {' and '.join(secrets)} in clear.",
        secrets=secrets,
        hint="Put TLS before the server and write BRANCHLAKE_SPARK_REMOTE=sc://host:port/;use_ssl=true, or"
        " reach the server by a loopback address, for instance through an SSH tunnel (docs/deployment.md).",
    )


def require_known_fields(field_names: Iterable[str], valid_names: Collection[str], owner: str) -> None:
    """Raise ConfigurationError for a field that `owner` does not have, with the name that was meant."""
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


class Settings(BaseSettings):
    """Where the lake is and how its machinery behaves. Times are seconds unless the name says otherwise.

    Each field is read from the environment as `BRANCHLAKE_<FIELD>`; what is given to the class comes first.

    Examples:
        .. code-block:: python

            from branchlake_dagster import Settings

            settings = Settings(nessie_uri="https://nessie.example.com/api/v2", warehouse="s3://lake/tables")
    """

    model_config = SettingsConfigDict(env_prefix=VARIABLE_PREFIX, extra="forbid", frozen=True)

    state_dir: Path = Field(
        Path(".branchlake"), description="Folder of the embedded lakehouse: data, logs, process records."
    )

    nessie_uri: str | None = Field(None, description="Nessie REST v2 endpoint; unset: embedded server.")
    nessie_token: SecretStr | None = Field(None, description="Bearer token for Nessie.")
    nessie_verify_tls: bool | str = Field(True, description="Verify TLS; or the path of a CA bundle.")
    nessie_port: int = Field(0, ge=0, le=65535, description="Port of the embedded Nessie; 0: any free one.")

    guard_nessie: bool = Field(
        True, description="Ask for a token at the embedded Nessie, which other local accounts do not have."
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
    spark_master: str = Field("local[*]", description="Master of a classic session and the embedded server.")
    spark_driver_memory: str = Field("3g", description="Heap of the embedded Spark server.")
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
        None, description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, where Kafka asks for SASL."
    )
    kafka_username: str | None = Field(None, description="User name for Kafka's SASL.")
    kafka_password: SecretStr | None = Field(None, description="Password for Kafka's SASL.")
    kafka_ca: Path | None = Field(None, description="PEM certificates that Kafka's brokers are trusted by.")
    kafka_certificate: Path | None = Field(
        None, description="PEM file with the key and certificates by which Kafka's brokers know us."
    )
    kafka_port: int = Field(
        0, ge=0, le=65535, description="Port of the embedded Kafka broker; 0: any free one."
    )

    landing: Path | None = Field(
        None, description="Folder of landing files, for ingestion without Kafka; unset: landing in state_dir."
    )
    landing_keep_h: float = Field(
        24.0, ge=0, description="Hours that landing files are kept at least, also when they are on main."
    )
    receivers: str | None = Field(
        None, description="Monitors of receivers (http://host:9464,…), whose counts topics' assets show."
    )

    run_launcher: Literal["warm", "dagster"] = Field(
        "warm",
        description="How WarmRunLauncher starts runs: forked from a warm process, or in Dagster's own way.",
    )

    default_namespace: str = Field(
        "lake", pattern=r"^\w+$", description="Iceberg namespace of assets without a key prefix."
    )
    widen_columns: bool = Field(
        True,
        description="Let a frame change its table as Iceberg can without loss (int to long, float to double,"
        " more decimal digits, new struct fields); false: only new nullable columns.",
    )
    require_checks: bool = Field(
        True, description="Block a run that wrote an asset for which no check is defined."
    )
    unpartitioned_checks: Literal["warn", "error", "allow"] = Field(
        "warn",
        description="What a check without partitions_def on a partitioned asset is when definitions load; it"
        " reads the whole table on every run.",
    )
    preview_rows: int = Field(
        5, ge=0, le=50, description="Rows of each materialisation that Dagster's pages show; 0: none."
    )
    publish_interval_s: int = Field(
        3, ge=1, description="Seconds between ticks of the publication sensor (Dagster looks every 5)."
    )
    publish_in_run: bool = Field(
        True, description="Let a run publish itself at its end when no other publisher is at work."
    )
    publish_budget_s: float = Field(
        30.0, gt=0, description="Longest tick of the publication sensor; what is left waits for the next one."
    )
    recheck_timeout_min: float = Field(
        60.0, gt=0, description="Minutes after which a run that checks a rebased table is given up."
    )
    reap_interval_min: int = Field(60, ge=1, le=60, description="Minutes between runs of the reaper.")
    orphan_grace_min: float = Field(
        60.0, gt=0, description="Minutes without a commit after which a branch of an unknown run is reaped."
    )
    orphan_max_age_h: float = Field(
        6.0,
        gt=0,
        description="Hours without a sign of life after which the branch of an active run without a heartbeat"
        " is reaped.",
    )

    heartbeat_interval_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds between a writer's heartbeats; three missed: suspect, then dead.",
    )
    watch_interval_s: int = Field(
        30, ge=1, description="Seconds between looks at silent writers; dead after three looks."
    )
    exclusive_wait_s: float = Field(
        600.0,
        ge=0,
        description="Seconds that a run waits for another one that writes the same exclusive assets.",
    )
    keep_failed_hours: float = Field(
        0.0, ge=0, description="Hours the branch of a failed, blocked or refused run is kept for debugging."
    )
    discard_grace_h: float = Field(
        24.0, gt=0, description="Hours after which the data files of a discarded branch are deleted."
    )
    when_unavailable: Literal["fail", "direct_main"] = Field(
        "fail", description="What a run does when its branch cannot be created: fail, or write to main."
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_unread_variables(cls, data: Any) -> Any:
        """A mistyped BRANCHLAKE_NESSIE_URI once wrote to another lake."""
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
                    hint=f"{suggestion}Unset it, or see docs/settings.md for those that are read.",
                    reason="unknown_variable",
                    subject=name,
                )
        if isinstance(data, Mapping):
            require_known_fields(data, cls.model_fields, cls.__name__)
        return data

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
        # Spark, PyIceberg and Nessie would each make something else of a bare path.
        if value is None or re.match(r"file:///|(?!file:)[a-z][a-z0-9+.-]*://[^/]", value):
            return value
        path = value.removeprefix("file:").lstrip("/")
        raise ValueError(f"{value!r} has no scheme; write file:///{path}, or s3://bucket/folder")

    @field_validator("nessie_verify_tls", mode="before")
    @classmethod
    def _parse_boolean_or_path(cls, value: object) -> object:
        # An environment variable is always text: "false" is no file.
        return {"true": True, "false": False}.get(str(value).lower(), value)

    @field_validator("reap_interval_min")
    @classmethod
    def _require_divisor_of_60(cls, value: int) -> int:
        if 60 % value:
            raise ValueError(
                f"{value} does not divide an hour; use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60"
            )
        return value

    @model_validator(mode="after")
    def _require_tls_for_secrets(self) -> Self:
        self.require_tls_to_spark()
        return self

    def require_tls_to_spark(self, *other_secrets: str) -> None:
        """Raise SecretWithoutTls if Spark is remote and would get secrets in clear.

        They are those of the settings, and `other_secrets`, each described in a few words.
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
        """The names of the settings that nothing may show."""
        return tuple(name for name, field in cls.model_fields.items() if field.annotation == SecretStr | None)

    def without_secrets(self) -> dict[str, Any]:
        """What was set, without the secrets: as `LakehouseResource` takes it."""
        return self.model_dump(exclude_unset=True, exclude=set(self.secret_names()), mode="json")

    @property
    def warehouse_uri(self) -> str:
        """The warehouse, with the embedded default filled in."""
        return self.warehouse or f"file://{self.state_dir}/warehouse"

    @property
    def lake_id(self) -> str:
        """The same for all processes that work on one lake, another for another lake: 16 hex digits."""
        return hashlib.sha256(f"{self.nessie_uri} {self.warehouse_uri}".encode()).hexdigest()[:16]

    @property
    def landing_folder(self) -> Path:
        """Where landing files lie."""
        return self.landing or self.state_dir / "landing"

    @property
    def receiver_monitors(self) -> tuple[str, ...]:
        """The monitors of receivers, one by one."""
        return tuple(address.strip() for address in (self.receivers or "").split(",") if address.strip())

    @property
    def embedded_warehouse(self) -> bool:
        """Whether the tables lie in the state folder."""
        return self.warehouse_uri == f"file://{self.state_dir}/warehouse"

    @property
    def embedded_nessie(self) -> bool:
        """Whether we start Nessie ourselves."""
        return self.nessie_uri is None

    @property
    def embedded_spark(self) -> bool:
        """Whether we start a Spark Connect server ourselves."""
        return self.session_kind == "connect" and self.spark_remote is None

    def file_io_properties(self) -> dict[str, str]:
        """PyIceberg's FileIO properties for the warehouse; secrets included, so never log them."""
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
        """The same for Python workers of Spark, which get them inside the plan of a query.

        Without the S3 keys if Spark is remote: a plan is pickled, kept by Spark and sent over `sc://`, which
        is not encrypted. Workers there take the keys from their own environment (`AWS_ACCESS_KEY_ID`, …).
        """
        properties = self.file_io_properties()
        if self.spark_remote is None:
            return properties
        return {name: value for name, value in properties.items() if name not in _S3_KEYS}
