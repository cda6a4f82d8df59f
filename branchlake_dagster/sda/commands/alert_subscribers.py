"""Store the positions and the acknowledgements of subscribers to alerts in the state folder.

They are files and not rows of the lake, because a command that wrote to `main` would bypass branches and
checks. A position is replaced atomically, and an acknowledgement is a line at the end of a file. The
functions return after the data was flushed to disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.file_lock import file_lock, try_file_lock
from branchlake_dagster.history.change import Position
from branchlake_dagster.sda.alerts.log_entries import format_time

FOLDER = "alert_subscribers"
"""The folder's name in the state folder."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_POSITION_FIELD = "position"


class SubscriberBusy(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another process already delivers the alerts of this subscriber."""


class SubscriberDamaged(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The file of a subscriber or of the acknowledgements cannot be read."""


@dataclass(frozen=True)
class Acknowledgement:
    """A subscriber's acknowledgement of one version of an alert.

    Each correction makes a new version, which must be acknowledged again. `sequence` is the version.
    """

    alert_id: str
    sequence: int
    subscriber: str
    acknowledged_at: datetime
    note: str | None = None


@dataclass(frozen=True)
class StoredPosition:
    """The position of a known subscriber. `position` is None if the log did not exist when it subscribed."""

    position: Position | None


class SubscriberStore:
    """The files of all subscribers in one state folder.

    Args:
        state_dir: The state folder. The subfolder `alert_subscribers` is created with the first file.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    @contextmanager
    def hold(self, subscriber: str) -> Iterator[None]:
        """Lock a subscriber against other processes while the block runs. Raises SubscriberBusy."""
        lock_path = self._path_of(subscriber, "lock")
        make_private_folder(self._folder)
        with lock_path.open("a") as handle:
            if not try_file_lock(handle.fileno()):
                raise SubscriberBusy(
                    f"Another process delivers the alerts of subscriber {subscriber}.",
                    subject=subscriber,
                    hint="End that process, or give this one a name of its own: --subscriber NAME.",
                )
            yield

    def load_position(self, subscriber: str) -> StoredPosition | None:
        """Return a subscriber's position, or None for a new subscriber. Raises SubscriberDamaged."""
        path = self._path_of(subscriber, "json")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))[_POSITION_FIELD]
            return StoredPosition(None if values is None else Position.from_dict(values))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise SubscriberDamaged(
                f"The position of subscriber {subscriber} cannot be read: {path}.",
                subject=subscriber,
                hint="Start anew: branchlake sda alerts --follow --restart --since TIME.",
            ) from error

    def save_position(self, subscriber: str, position: Position | None) -> None:
        """Replace a subscriber's position atomically. The new position is on disk when this returns."""
        path = self._path_of(subscriber, "json")
        make_private_folder(self._folder)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        with scratch.open("w", encoding="utf-8") as file:
            json.dump({_POSITION_FIELD: None if position is None else position.as_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        self._sync_folder()

    def add_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Record an acknowledgement. It is on disk when this returns.

        Its subscriber may have any name of printable characters, such as a login name of another system,
        because no file has that name. Raises ConfigurationError for an empty or unprintable name.
        """
        subscriber = acknowledgement.subscriber
        if not subscriber.strip() or not subscriber.isprintable():
            raise ConfigurationError(
                f"{subscriber!r} cannot be the name of a subscriber.",
                hint="Give a name of printable characters with --subscriber.",
                reason="subscriber_name",
                subject=subscriber,
            )
        make_private_folder(self._folder)
        values = {
            **asdict(acknowledgement),
            "acknowledged_at": format_time(acknowledgement.acknowledged_at),
        }
        line = json.dumps(values, ensure_ascii=False).encode()
        with file_lock(self._folder / "acknowledgements.lock"), self._acknowledgements.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a process died while it wrote its line
                    line = b"\n" + line
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._sync_folder()

    def load_acknowledgements(self) -> list[Acknowledgement]:
        """Return all acknowledgements, oldest first.

        An incomplete line, which a killed process left, is skipped. Raises SubscriberDamaged.
        """
        try:
            content = self._acknowledgements.read_bytes()
        except FileNotFoundError:
            return []
        return [one for line in content.split(b"\n") if (one := self._parse_line(line)) is not None]

    @property
    def _acknowledgements(self) -> Path:
        return self._folder / "acknowledgements.jsonl"

    def _parse_line(self, line: bytes) -> Acknowledgement | None:
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        try:
            moment = datetime.fromisoformat(values.pop("acknowledged_at"))
            return _require_types(Acknowledgement(**values, acknowledged_at=moment))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SubscriberDamaged(
                f"The acknowledgements cannot be read: {self._acknowledgements}.",
                subject=str(self._acknowledgements),
                hint="Remove the line that is not an acknowledgement.",
            ) from error

    def _path_of(self, subscriber: str, suffix: str) -> Path:
        _require_name(subscriber)
        return self._folder / f"subscriber-{subscriber}.{suffix}"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _require_types(acknowledgement: Acknowledgement) -> Acknowledgement:
    """Return the acknowledgement; raises TypeError if a field has another type, or the time has no zone."""
    texts = [acknowledgement.alert_id, acknowledgement.subscriber, acknowledgement.note or ""]
    has_types = type(acknowledgement.sequence) is int and all(isinstance(text, str) for text in texts)
    if not has_types or acknowledgement.acknowledged_at.tzinfo is None:
        raise TypeError(f"not an acknowledgement: {acknowledgement}")
    return acknowledgement


def latest_acknowledgements(
    acknowledgements: list[Acknowledgement],
) -> dict[str, list[Acknowledgement]]:
    """Return each subscriber's acknowledgement of the newest version, by alert id."""
    latest: dict[tuple[str, str], Acknowledgement] = {}
    for one in acknowledgements:
        key = one.alert_id, one.subscriber
        earlier = latest.pop(key, None)
        latest[key] = one if earlier is None or one.sequence >= earlier.sequence else earlier
    by_alert: dict[str, list[Acknowledgement]] = {}
    for (alert_id, _), one in latest.items():
        by_alert.setdefault(alert_id, []).append(one)
    return by_alert


def _require_name(subscriber: str) -> None:
    if not _NAME.fullmatch(subscriber):
        raise ConfigurationError(
            f"{subscriber!r} cannot be the name of a subscriber.",
            hint="Give a name with --subscriber (the default is your login name): at most 64 letters, digits"
            " and _ . @ -, and a letter or digit first.",
            reason="subscriber_name",
            subject=subscriber,
        )
