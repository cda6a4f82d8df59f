"""How a cluster is reached: one set of options, as librdkafka and as Spark's Java client take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings

_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


@dataclass(frozen=True)
class Cluster:
    """Addresses and credentials of a Kafka cluster.

    `bootstrap` is `host:port,…`; `security` is Kafka's `security.protocol`; `ca` is a file of PEM
    certificates.
    """

    bootstrap: str
    security: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: Path | None = None

    @classmethod
    def of(cls, settings: Settings, bootstrap: str) -> Cluster:
        """The cluster at an address, with the credentials of the settings. Raises ConfigurationError."""
        password = settings.kafka_password.get_secret_value() if settings.kafka_password else None
        return cls(
            bootstrap,
            settings.kafka_security,
            settings.kafka_sasl_mechanism,
            settings.kafka_username,
            password,
            settings.kafka_ca,
        )

    def __post_init__(self) -> None:
        if not self.security.startswith("SASL"):
            return
        if self.mechanism not in _LOGIN_MODULES:
            raise ConfigurationError(
                f"Unknown SASL mechanism {self.mechanism!r}.",
                hint=f"BRANCHLAKE_KAFKA_SASL_MECHANISM is one of {', '.join(_LOGIN_MODULES)}.",
            )
        if not self.username or not self.password:
            raise ConfigurationError(
                f"{self.security} needs a user name and a password.",
                hint="Set BRANCHLAKE_KAFKA_USERNAME and BRANCHLAKE_KAFKA_PASSWORD.",
            )

    def client_options(self) -> dict[str, str]:
        """For librdkafka (confluent-kafka). Secrets included: never log them. Raises ConfigurationError."""
        found = {"bootstrap.servers": self.bootstrap, "security.protocol": self.security}
        if self.mechanism and self.username and self.password:
            found |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        if self.ca is not None:
            _certificates(self.ca)
            found["ssl.ca.location"] = str(self.ca)
        return found

    def spark_options(self) -> dict[str, str]:
        """For Spark's source `kafka`. Secrets included; Spark hides options of this name in its plans.

        Raises ConfigurationError.
        """
        found: Mapping[str, str] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security,
            **self._java_sasl(),
            **self._java_trust(),
        }
        return {f"kafka.{name}": value for name, value in found.items()}

    def _java_sasl(self) -> dict[str, str]:
        if not (self.mechanism and self.username and self.password):
            return {}
        login = f'username="{_escaped(self.username)}" password="{_escaped(self.password)}"'
        return {
            "sasl.mechanism": self.mechanism,
            "sasl.jaas.config": f"{_LOGIN_MODULES[self.mechanism]} required {login};",
        }

    def _java_trust(self) -> dict[str, str]:
        if self.ca is None:
            return {}
        certificates = _certificates(self.ca)
        # By value: the executors need not have the file.
        return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": certificates}


def _certificates(file: Path) -> str:
    hint = "BRANCHLAKE_KAFKA_CA is a file of PEM certificates."
    try:
        found = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"The certificates {file} cannot be read: {why}.", hint=hint) from error
    if "-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigurationError(f"{file} holds no certificate.", hint=hint)
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
