"""How both commands reach Kafka."""

from __future__ import annotations

from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.embedded_kafka import cluster_at
from branchlake_dagster.settings import Settings


def kafka_options(bootstrap: str, file: Path | None) -> dict[str, str]:
    """Options for librdkafka: those of a file of ``key=value`` lines, and the brokers.

    Without a file the credentials are those of the settings (``BRANCHLAKE_KAFKA_SECURITY`` and so on), and
    the embedded broker's own for its address. Raises ConfigurationError.
    """
    if file is None:
        return cluster_at(Settings(), bootstrap).client_options()
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            # Not the line itself: it may hold a password.
            raise ConfigurationError(
                f"Line {number} of {file} is no option.",
                hint="Write it as key=value.",
                reason="kafka_option",
                subject=str(file),
            )
        found[name.strip()] = value.strip()
    return {**found, "bootstrap.servers": bootstrap}
