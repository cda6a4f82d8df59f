"""The login of the embedded broker: one user, whose password is in the state folder for its owner alone.

Other accounts of the machine reach the loopback address too. Both listeners of the broker ask for SASL PLAIN:
that of clients, and that of the controller, which takes commands as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from branchlake_dagster.embedded.state_folder import write_secret
from branchlake_dagster.ingest.kafka.cluster import Cluster

USER = "branchlake"
CLIENTS, CONTROLLER = "LOCAL", "CONTROLLER"
"""Names of the broker's two listeners."""
_SECURITY, _MECHANISM = "SASL_PLAINTEXT", "PLAIN"
_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


class BrokerLogin:
    """The login of the broker of one state folder.

    `run/kafka.password` has the password, and `run/kafka.properties` what Kafka's own console tools need.
    """

    def __init__(self, root: Path) -> None:
        self._password_path = root / "run" / "kafka.password"
        self.client_properties = root / "run" / "kafka.properties"

    @property
    def exists(self) -> bool:
        """Whether a password is stored."""
        return self._stored_password() is not None

    def create_password(self) -> str:
        """Return the password, created if there is none, and write the file for Kafka's console tools."""
        password = self._stored_password() or secrets.token_urlsafe(24)
        write_secret(self._password_path, password)
        login = f'{_MODULE} required username="{USER}" password="{password}";'
        write_secret(
            self.client_properties,
            f"security.protocol={_SECURITY}\nsasl.mechanism={_MECHANISM}\nsasl.jaas.config={login}\n",
        )
        return password

    def cluster(self, address: str) -> Cluster:
        """Return the broker at `address` with its login.

        Without a password if none is stored: the broker that runs was started by a release that had none.
        """
        password = self._stored_password()
        return Cluster(address, _SECURITY, _MECHANISM, USER, password) if password else Cluster(address)

    def _stored_password(self) -> str | None:
        try:
            return self._password_path.read_text().strip() or None
        except FileNotFoundError:
            return None


def login_properties(password: str) -> Mapping[str, str]:
    """Return the broker's properties that make both listeners ask for the login.

    The password is in them: write them only into a file that nobody else can read.
    """
    login = f'{_MODULE} required username="{USER}" password="{password}" user_{USER}="{password}";'
    properties = {
        "listener.security.protocol.map": f"{CLIENTS}:{_SECURITY},{CONTROLLER}:{_SECURITY}",
        "inter.broker.listener.name": CLIENTS,
        "sasl.mechanism.inter.broker.protocol": _MECHANISM,
        "sasl.mechanism.controller.protocol": _MECHANISM,
    }
    for listener in (CLIENTS, CONTROLLER):
        prefix = f"listener.name.{listener.lower()}"
        properties |= {
            f"{prefix}.sasl.enabled.mechanisms": _MECHANISM,
            f"{prefix}.plain.sasl.jaas.config": login,
        }
    return properties
