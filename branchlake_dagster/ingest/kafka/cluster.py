"""How a cluster is reached: one set of options, as librdkafka and as Spark's Java client take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.kafka.pem import certificates, own_certificate
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
    certificates, `certificate` one with a key and the certificates by which we are known.
    """

    bootstrap: str
    security: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: Path | None = None
    certificate: Path | None = None

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
            settings.kafka_certificate,
        )

    def __post_init__(self) -> None:
        if self.certificate is not None and "SSL" not in self.security:
            raise ConfigurationError(
                f"A certificate of one's own is shown over TLS only, not with {self.security}.",
                hint="Set BRANCHLAKE_KAFKA_SECURITY to SSL or SASL_SSL, or no BRANCHLAKE_KAFKA_CERTIFICATE.",
                reason="certificate_without_tls",
                subject="BRANCHLAKE_KAFKA_CERTIFICATE",
            )
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
            certificates(self.ca)
            found["ssl.ca.location"] = str(self.ca)
        if self.certificate is not None:
            own_certificate(self.certificate)
            place = str(self.certificate)
            found |= {"ssl.certificate.location": place, "ssl.key.location": place}
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
            **self._java_certificate(),
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
        # By value: the executors need not have the file.
        return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": certificates(self.ca)}

    def _java_certificate(self) -> dict[str, str]:
        if self.certificate is None:
            return {}
        key, chain = own_certificate(self.certificate)
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.key": key,
            "ssl.keystore.certificate.chain": chain,
        }


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
