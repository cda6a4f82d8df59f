"""One line of JSON at a time over a socket between two processes of one user, and open files with it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_CHUNK = 65536
_MOST_FILES = 8


class ChannelClosed(EOFError):  # noqa: N818 - named like the other outcomes
    """The other end is gone, so nothing that was asked of it will be done."""


def send(peer: socket.socket, message: dict[str, Any], *, passing: Sequence[int] = ()) -> None:
    """Send one message, and with it copies of the file descriptors `passing`. Raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    if passing:
        # One byte carries the descriptors, so that they cannot be lost in a partial write of the message.
        socket.send_fds(peer, [b"@"], list(passing))
    peer.sendall(data)


def receive(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and the file descriptors that came with it. Raises ChannelClosed, or TimeoutError."""
    passed: list[int] = []
    data = b""
    try:
        while not data.endswith(b"\n"):
            more, descriptors, _, _ = socket.recv_fds(peer, _CHUNK, _MOST_FILES)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # a program started by a run must not keep it open
            passed += descriptors
            if not more:
                raise ChannelClosed("The process at the other end is gone.")
            data += more.removeprefix(b"@") if descriptors else more
    except (OSError, ChannelClosed) as error:
        for descriptor in passed:
            os.close(descriptor)
        if isinstance(error, ConnectionError):
            raise ChannelClosed("The process at the other end is gone.") from error
        raise
    message: dict[str, Any] = json.loads(data)
    return message, passed
