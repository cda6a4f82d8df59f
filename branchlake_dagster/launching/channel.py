"""One line of JSON at a time over a socket between two processes of one user."""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 65536


class ChannelClosed(EOFError):  # noqa: N818 - named like the other outcomes
    """The other end is gone, so nothing that was asked of it will be done."""


def send(peer: socket.socket, message: dict[str, Any], *, passing: socket.socket | None = None) -> None:
    """Send one message, and with it a copy of `passing`. Raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    if passing is not None:
        # One byte carries the descriptor, so that it cannot be lost in a partial write of the message.
        socket.send_fds(peer, [b"@"], [passing.fileno()])
    peer.sendall(data)


def receive(peer: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """The next message and the socket that came with it. Raises ChannelClosed, or TimeoutError."""
    passed: socket.socket | None = None
    data = b""
    try:
        while not data.endswith(b"\n"):
            more, descriptors, _, _ = socket.recv_fds(peer, _CHUNK, 1)
            for descriptor in descriptors:
                passed = socket.socket(fileno=descriptor)
                passed.set_inheritable(False)  # a program started by a run must not keep it open
            if not more:
                raise ChannelClosed("The process at the other end is gone.")
            data += more.removeprefix(b"@") if descriptors else more
    except ConnectionError as error:
        raise ChannelClosed("The process at the other end is gone.") from error
    message: dict[str, Any] = json.loads(data)
    return message, passed
