"""A channel between two processes of one user: JSON lines, and open files, over a socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_CHUNK = 65536
_MOST_FILES = 8


class ChannelClosed(EOFError):  # noqa: N818 - named like the other outcomes
    """The other process has closed the channel, so it will not answer."""


def send_message(peer: socket.socket, message: dict[str, Any], *, descriptors: Sequence[int] = ()) -> None:
    """Send one message as JSON to the process at the other end of `peer`. Raises OSError.

    The other process gets copies of the open file descriptors `descriptors`; this process keeps its own.
    """
    data = json.dumps(message).encode() + b"\n"
    if descriptors:
        # One byte carries the descriptors, so that they cannot be lost in a partial write of the message.
        socket.send_fds(peer, [b"@"], list(descriptors))
    peer.sendall(data)


def receive_message(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the next message; return it and its file descriptors, which the caller must close.

    Raises ChannelClosed, TimeoutError or another OSError.
    """
    received: list[int] = []
    data = b""
    try:
        while not data.endswith(b"\n"):
            chunk, descriptors, _, _ = socket.recv_fds(peer, _CHUNK, _MOST_FILES)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # a program started by a run must not keep it open
            received += descriptors
            if not chunk:
                raise ChannelClosed("The process at the other end has closed the channel.")
            data += chunk.removeprefix(b"@") if descriptors else chunk
    except (OSError, ChannelClosed) as error:
        for descriptor in received:
            os.close(descriptor)
        if isinstance(error, ConnectionError):
            raise ChannelClosed("The process at the other end has closed the channel.") from error
        raise
    message: dict[str, Any] = json.loads(data)
    return message, received
