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


def send_message(peer: socket.socket, message: dict[str, Any], *, descriptors: Sequence[int] = ()) -> None:
    """Send one message, and with it copies of the file descriptors `descriptors`. Raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    if descriptors:
        # One byte carries the descriptors, so that they cannot be lost in a partial write of the message.
        socket.send_fds(peer, [b"@"], list(descriptors))
    peer.sendall(data)


def receive_message(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and the file descriptors that came with it. Raises ChannelClosed, or TimeoutError."""
    received: list[int] = []
    data = b""
    try:
        while not data.endswith(b"\n"):
            chunk, descriptors, _, _ = socket.recv_fds(peer, _CHUNK, _MOST_FILES)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # a program started by a run must not keep it open
            received += descriptors
            if not chunk:
                raise ChannelClosed("The process at the other end is gone.")
            data += chunk.removeprefix(b"@") if descriptors else chunk
    except (OSError, ChannelClosed) as error:
        for descriptor in received:
            os.close(descriptor)
        if isinstance(error, ConnectionError):
            raise ChannelClosed("The process at the other end is gone.") from error
        raise
    message: dict[str, Any] = json.loads(data)
    return message, received
