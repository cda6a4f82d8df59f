"""The address and credentials of a Kafka cluster, as options for librdkafka and for Spark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings

_CERTIFICATE_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY_BLOCK = re.compile(r"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)


def read_ca_bundle(file: Path) -> str:
    """Return the content of a PEM file of CA certificates.

    Raises ConfigurationError if the file cannot be read or has no certificate.
    """
    hint = "Set BRANCHLAKE_KAFKA_CA to a file of PEM certificates."
    pem = _read_pem(file, "certificates", hint)
    if "-----BEGIN CERTIFICATE-----" not in pem:
        raise ConfigurationError(
            f"{file} contains no certificate.", hint=hint, reason="no_certificate", subject=str(file)
        )
    return pem


def read_client_certificate(file: Path) -> tuple[str, str]:
    """Return the private key and the certificate chain of a client's PEM file, as two PEM texts.

    Raises ConfigurationError if one of them is missing or unusable. The message never contains the key.
    """
    hint = "Set BRANCHLAKE_KAFKA_CERTIFICATE to a PEM file with a private key (PKCS #8) and its certificates."
    pem = _read_pem(file, "the client certificate", hint)
    key, chain = _KEY_BLOCK.search(pem), _CERTIFICATE_BLOCK.findall(pem)
    if not chain:
        raise ConfigurationError(
            f"{file} contains no certificate.", hint=hint, reason="no_certificate", subject=str(file)
        )
    if key is None:
        if "PRIVATE KEY-----" not in pem:
            raise ConfigurationError(
                f"{file} contains no private key.", hint=hint, reason="no_private_key", subject=str(file)
            )
        raise ConfigurationError(
            f"The private key in {file} is encrypted, or in a format that Java cannot read.",
            hint="Convert it with openssl pkcs8 -topk8 -nocrypt -in key.pem, and append the certificates to"
            " the output.",
            reason="private_key_form",
            subject=str(file),
        )
    return key[0], "\n".join(chain)


def _read_pem(file: Path, what: str, hint: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigurationError(
            f"The file of {what} {file} cannot be read: {why}.",
            hint=hint,
            reason="unreadable",
            subject=str(file),
        ) from error


_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


@dataclass(frozen=True)
class KafkaCluster:
    """Addresses and credentials of a Kafka cluster.

    `bootstrap` is `host:port,…`. `security` is Kafka's `security.protocol`, `mechanism` the SASL mechanism.
    `ca` is a file of PEM certificates. `certificate` is a PEM file with the client's private key and its
    certificates. Raises ConfigurationError if the fields contradict each other.
    """

    bootstrap: str
    security: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: Path | None = None
    certificate: Path | None = None

    @classmethod
    def from_settings(cls, settings: Settings, bootstrap: str) -> KafkaCluster:
        """Create the cluster at `bootstrap` with the credentials of the settings.

        Raises ConfigurationError if the settings contradict each other.
        """
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
                f"A client certificate needs TLS, but the security protocol is {self.security}.",
                hint="Set BRANCHLAKE_KAFKA_SECURITY to SSL or SASL_SSL, or unset"
                " BRANCHLAKE_KAFKA_CERTIFICATE.",
                reason="certificate_without_tls",
                subject="BRANCHLAKE_KAFKA_CERTIFICATE",
            )
        if not self.security.startswith("SASL"):
            return
        if self.mechanism not in _LOGIN_MODULES:
            raise ConfigurationError(
                f"Unknown SASL mechanism {self.mechanism!r}.",
                hint=f"Set BRANCHLAKE_KAFKA_SASL_MECHANISM to one of {', '.join(_LOGIN_MODULES)}.",
            )
        if not self.username or not self.password:
            raise ConfigurationError(
                f"The security protocol {self.security} needs a user name and a password.",
                hint="Set BRANCHLAKE_KAFKA_USERNAME and BRANCHLAKE_KAFKA_PASSWORD.",
            )

    def client_options(self) -> dict[str, str]:
        """Build the options for librdkafka (confluent-kafka). They contain secrets: never log them.

        Raises ConfigurationError if a file of certificates is not valid.
        """
        options = {"bootstrap.servers": self.bootstrap, "security.protocol": self.security}
        if self.mechanism and self.username and self.password:
            options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        if self.ca is not None:
            read_ca_bundle(self.ca)
            options["ssl.ca.location"] = str(self.ca)
        if self.certificate is not None:
            read_client_certificate(self.certificate)
            certificate_path = str(self.certificate)
            options |= {"ssl.certificate.location": certificate_path, "ssl.key.location": certificate_path}
        return options

    def spark_options(self) -> dict[str, str]:
        """Build the options for Spark's source `kafka`, with the prefix `kafka.`.

        They contain secrets. Spark hides options of these names in its plans. Raises ConfigurationError if a
        file of certificates is not valid.
        """
        options: Mapping[str, str] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security,
            **self._java_sasl(),
            **self._java_trust(),
            **self._java_certificate(),
        }
        return {f"kafka.{name}": value for name, value in options.items()}

    def _java_sasl(self) -> dict[str, str]:
        if not (self.mechanism and self.username and self.password):
            return {}
        login = f'username="{_escape_quotes(self.username)}" password="{_escape_quotes(self.password)}"'
        return {
            "sasl.mechanism": self.mechanism,
            "sasl.jaas.config": f"{_LOGIN_MODULES[self.mechanism]} required {login};",
        }

    def _java_trust(self) -> dict[str, str]:
        if self.ca is None:
            return {}
        # The options contain the certificates themselves, so the executors need not have the file.
        return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": read_ca_bundle(self.ca)}

    def _java_certificate(self) -> dict[str, str]:
        if self.certificate is None:
            return {}
        key, chain = read_client_certificate(self.certificate)
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.key": key,
            "ssl.keystore.certificate.chain": chain,
        }


def _escape_quotes(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
