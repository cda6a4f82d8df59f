"""A broker with a listener for each way to be reached."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from branchlake_dagster.embedded.process import LOOPBACK, choose_port
from branchlake_dagster.ingest import embedded_kafka as broker_login
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

USER = "ali,ce"
PASSWORD = 'never-shown "\\;= word'
"""With all that JAAS, properties and SCRAM take for something else."""
SECRET = "never-shown"
"""The part of it that is looked for: whatever quotes the password may escape the rest."""
_MODULE = "org.apache.kafka.common.security"
_LISTENERS = {"SECURED": "SASL_SSL", "ENCRYPTED": "SSL", "NAMED": "SASL_PLAINTEXT", "MUTUAL": "SSL"}
READER = "reader"
"""May do what it is allowed; its password is the same."""
_SCRAM = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}


class SecuredBroker:
    """Starts in `settings.state_dir`; `certificate` is a PEM file with key and certificate.

    Its listener MUTUAL knows clients by certificates of the authorities in `trusted`.
    """

    def __init__(self, settings: Settings, certificate: Path, trusted: Path) -> None:
        self._ports = {name: choose_port(0, setting=f"the port of {name}") for name in _LISTENERS}
        self._kafka = EmbeddedKafka(settings, extra_properties=_properties(self._ports, certificate, trusted))

    def up(self) -> str:
        """Start it, and make the user known; the address of the listener that is the package's own."""
        cluster = self._kafka.cluster()
        admin = AdminClient(cluster.client_options())
        for user, mechanism in product(
            (USER, READER), _SCRAM.values()
        ):  # one at a time, as the broker wants it
            told = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            for future in admin.alter_user_scram_credentials([told]).values():
                future.result(60)
        return cluster.bootstrap

    def down(self) -> None:
        self._kafka.down()

    @property
    def pid(self) -> int:
        record = self._kafka.record
        assert record is not None
        return record.pid

    @property
    def log(self) -> Path:
        return self._kafka.log_path

    def allow(self, who: str, *wanted: tuple[ResourceType, str, AclOperation]) -> None:
        """Let somebody do this to topics and groups of these names."""
        admin = AdminClient(self._kafka.cluster().client_options())
        rules = [
            AclBinding(kind, name, ResourcePatternType.LITERAL, who, "*", operation, AclPermissionType.ALLOW)
            for kind, name, operation in wanted
        ]
        for future in admin.create_acls(rules).values():
            future.result(60)
        # The controller has them then; the broker that goes by them hears of them a little later.
        everything = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            None,
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        assert holds_within(
            60, lambda: set(rules) <= set(admin.describe_acls(everything).result(60)), every_s=0.05
        )

    def address(self, security: str) -> str:
        """Where it is reached with this `security.protocol`, or at a listener of this name."""
        name = next(name for name, protocol in _LISTENERS.items() if security in (name, protocol))
        return f"{LOOPBACK}:{self._ports[name]}"


def _properties(ports: Mapping[str, int], certificate: Path, trusted: Path) -> dict[str, str]:
    places = ",".join(f"{name}://{LOOPBACK}:{port}" for name, port in ports.items())
    quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    found = {
        "listeners": places,
        "advertised.listeners": places,
        "listener.security.protocol.map": ",".join(f"{name}:{how}" for name, how in _LISTENERS.items()),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificate),
        "sasl.enabled.mechanisms": ",".join(["PLAIN", *_SCRAM]),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{USER};User:{broker_login.BROKER_USER}",
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PEM",
        "listener.name.mutual.ssl.truststore.location": str(trusted),
    }
    for listener in ("secured", "named"):
        prefix = f"listener.name.{listener}"
        plain = f'{_MODULE}.plain.PlainLoginModule required "user_{USER}"="{quoted}";'
        found[f"{prefix}.plain.sasl.jaas.config"] = plain
        for mechanism in _SCRAM:
            scram = f"{_MODULE}.scram.ScramLoginModule required;"
            found[f"{prefix}.{mechanism.lower()}.sasl.jaas.config"] = scram
    return found
