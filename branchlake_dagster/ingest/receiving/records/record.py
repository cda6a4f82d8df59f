"""What a receiver hands over, and what takes it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient

RECEIVER, PROTOCOL, RECEIVED_NS, SOURCE, CURSOR = (
    *("branchlake.receiver", "branchlake.protocol", "branchlake.received_ns"),
    *("branchlake.source", "branchlake.cursor"),
)
"""Names of a record's headers. Values are UTF-8 text; numbers are decimal."""


class Record(NamedTuple):
    """One message as it was received.

    ``cursor`` (HTTP only) is where to ask again when this is the last record that is known.
    """

    value: bytes
    key: bytes | None
    received_ns: int
    source: bytes
    cursor: bytes | None = None


class Roll(NamedTuple):
    """How much a sink takes at once: whichever is reached first."""

    records: int
    size_bytes: int
    age_s: float


class Origin(NamedTuple):
    """Which receiver a topic's records come from, and by which protocol."""

    receiver: str
    protocol: str


@dataclass(frozen=True)
class Resumed:
    """What a sink already has of a receiver: its last cursor, and `digest` of its last records' values."""

    cursor: bytes | None = None
    known: tuple[bytes, ...] = ()


def digest(value: bytes) -> bytes:
    """What a value is known by, for as long as it is remembered."""
    return hashlib.blake2b(value, digest_size=16).digest()


class NotHandedOver(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A sink did not take these records; the same call with them may be repeated."""

    def __init__(self, message: str, records: Sequence[Record], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.records = list(records)


class NotConfirmed(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """A sink was told to stop before it knew of these records; they may or may not be there."""

    def __init__(self, message: str, records: Sequence[Record]) -> None:
        super().__init__(message)
        self.records = list(records)


class PartitionTaken(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another receiver writes to this partition."""


class Sink(Protocol):
    """Takes records in order, one call after the other, from one thread; its calls block."""

    @property
    def roll(self) -> Roll:
        """How much to collect before a call of `write`."""

    def open(self, *, resume: bool) -> Resumed:
        """Make it ready; with ``resume`` say what it has of this receiver.

        Raises:
            Transient: not reachable now.
            Terminal: it never will be.

        """

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:
        """Hand over; when this returns they are durable. ``dropped`` is how many never got here so far.

        Raises:
            NotHandedOver: with those that are not there; the others are.
            NotConfirmed: `stop_waiting` was called meanwhile.

        """

    def stop_waiting(self) -> None:
        """Let a call of `write` that waits return soon. Any thread may call it."""

    def close(self) -> None:
        """Let go of files, locks and connections."""
