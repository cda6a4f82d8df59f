"""Ports of the embedded servers: one that is given, else the one a server had before, else a free one."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.embedded.private import private_folder
from branchlake_dagster.waiting import holds_within

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS, _TRIES = 20_000, 12_000, 50
"""Below Linux's range for clients, which begins at 32,768."""
_PATIENCE_S = 1.0


def choose_port(wanted: int, *, setting: str) -> int:
    """`wanted` when it is free, any free port for 0. Raises ConfigurationError when it is taken."""
    if not wanted:
        # Not one that the kernel gives away by itself: until a JVM listens, somebody's client had taken it.
        tried = (_FIRST_PORT + secrets.randbelow(_PORTS) for _ in range(_TRIES))
        return next((port for port in tried if _is_free(port)), 0) or _any_port()
    if not _is_free(wanted):
        raise ConfigurationError(
            f"Port {wanted} on {LOOPBACK} is in use by another program.",
            hint=f"Stop that program, or set {setting} to another port (0 takes any free one).",
            reason="port_in_use",
            subject=setting,
        )
    return wanted


def keep_port(wanted: int, path: Path, *, setting: str) -> int:
    """The port of a server whose last port is stored at `path`; addresses that were copied stay right.

    `wanted` if it is not 0, as `choose_port`. Otherwise the stored port if it is free within a second, and
    any free port if it is not or none is stored. The port is stored. Raises ConfigurationError and OSError.
    """
    stored = 0 if wanted else _stored(path)
    # The kernel takes some milliseconds to close what a killed process listened on.
    if stored and holds_within(_PATIENCE_S, lambda: _is_free(stored), every_s=0.02):
        wanted = stored
    port = choose_port(wanted, setting=setting)
    (private_folder(path.parent) / path.name).write_text(f"{port}\n")
    return port


def _stored(path: Path) -> int:
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 2**16 else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
