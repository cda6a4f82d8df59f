"""Deliver alerts to a subscriber: print new entries, flush them, then save the subscriber's position.

A subscriber is a named reader of the log of alerts. Its position is the last entry that it received.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import Transient
from branchlake_dagster.history.change import Position
from branchlake_dagster.sda.alerts.log_entries import Entry, entry_to_json, format_entry
from branchlake_dagster.sda.commands.alert_reader import AlertReader
from branchlake_dagster.sda.commands.alert_subscribers import StoredPosition, SubscriberStore


def format_line(entry: Entry, *, as_json: bool) -> str:
    """Return an entry as one line, without the line break."""
    return json.dumps(entry_to_json(entry)) if as_json else format_entry(entry)


def begin_subscription(
    reader: AlertReader, store: SubscriberStore, subscriber: str, *, since: datetime | None, restart: bool
) -> Position | None:
    """Return the position at which the delivery begins, and save it for a new subscriber.

    Args:
        reader: Reads the log.
        store: Holds the positions.
        subscriber: The subscriber's name. The caller must hold the subscriber (`SubscriberStore.hold`).
        since: A new subscriber receives the entries that were published after this time. None means now.
        restart: Whether a known subscriber begins like a new one.
    """
    stored = None if restart else store.load_position(subscriber)
    if stored is None:
        stored = StoredPosition(reader.position_at(since))
        store.save_position(subscriber, stored.position)
    return stored.position


def deliver_new_entries(
    reader: AlertReader,
    store: SubscriberStore,
    subscriber: str,
    position: Position | None,
    *,
    output: TextIO,
    as_json: bool,
) -> Position | None:
    """Print the entries that were published after a position, and return the position after them.

    At least once: the position is saved after the output was flushed. If the process dies in between, the
    entries of the last publication are printed again. Raises AlertLogChanged.
    """
    for delivery in reader.deliveries(position):
        output.writelines(f"{format_line(entry, as_json=as_json)}\n" for entry in delivery.entries)
        output.flush()
        store.save_position(subscriber, delivery.position)
        position = delivery.position
    return position


def follow_alerts(
    reader: AlertReader,
    store: SubscriberStore,
    subscriber: str,
    *,
    since: datetime | None,
    restart: bool,
    as_json: bool,
    interval_s: float,
    once: bool,
    report: Callable[[str], None],
    output: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Deliver entries as they are published, until the process is ended.

    With `once`, deliver the existing entries and return. While nothing is published, each interval costs one
    request. A transient error, such as a server that restarts, is reported once, and the next interval tries
    again. Raises AlertLogChanged and SubscriberBusy.
    """
    stream = output or sys.stdout
    with store.hold(subscriber):
        if since is not None and not restart and store.load_position(subscriber) is not None:
            report(f"Subscriber {subscriber} continues at its position, so --since does not count.")
        position = begin_subscription(reader, store, subscriber, since=since, restart=restart)
        delivered_head: str | None = None
        is_failing = False
        while True:
            try:
                head = reader.head_of_main()
                if head != delivered_head:
                    position = deliver_new_entries(
                        reader, store, subscriber, position, output=stream, as_json=as_json
                    )
                    delivered_head = head
                is_failing = False
            except Exception as error:
                if once or not isinstance(error, Transient | LakeNotRunning):
                    raise
                if not is_failing:
                    report(f"{error} The next look tries again.")
                is_failing = True
                # Part of a publication may have been delivered and saved.
                stored = store.load_position(subscriber)
                position = stored.position if stored is not None else None
            if once:
                return
            sleep(interval_s)
