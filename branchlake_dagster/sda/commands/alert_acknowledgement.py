"""Acknowledge alerts in the subscribers' files, and on the asset's page in Dagster."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import polars as pl
from dagster import AssetKey, AssetObservation, MetadataValue

from branchlake_dagster.cli.dagster_home import open_instance
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.alerts.entry_names import ALERT_TABLE, RETRACT
from branchlake_dagster.sda.commands.alert_list import AlertFilter, read_alerts
from branchlake_dagster.sda.commands.alert_subscribers import Acknowledgement, SubscriberStore
from branchlake_dagster.settings import Settings

UNKNOWN, RETRACTED = "unknown", "retracted"


class AlertNotHeld(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The alert cannot be acknowledged. `reason` is `UNKNOWN` or `RETRACTED`, `subject` the alert's id."""


def acknowledge_alert(
    reader: LakeReader,
    store: SubscriberStore,
    alert_id: str,
    subscriber: str,
    *,
    note: str | None,
    now: datetime,
) -> Acknowledgement:
    """Acknowledge the present version of an alert.

    Raises AlertNotHeld if the alert does not exist or was retracted.
    """
    entries = read_alerts(reader, AlertFilter(alert_id=alert_id), history=True).entries
    last = _require_held(entries, alert_id)
    acknowledgement = Acknowledgement(alert_id, last, subscriber, now, note)
    store.add_acknowledgement(acknowledgement)
    return acknowledgement


def _require_held(entries: pl.DataFrame | None, alert_id: str) -> int:
    """Return the sequence number of the alert's last entry, which is its present version.

    `entries` are the entries of this alert only, in the order of the log; None if there is no log. Raises
    AlertNotHeld if there is no entry, or if the last entry retracts the alert.
    """
    if entries is None or entries.is_empty():
        raise AlertNotHeld(
            f"There is no alert {alert_id}.",
            table=ALERT_TABLE,
            reason=UNKNOWN,
            subject=alert_id,
            hint="Copy the id from the last column of `branchlake sda alerts`.",
        )
    last = entries.row(-1, named=True)
    if last["kind"] == RETRACT:
        raise AlertNotHeld(
            f"Alert {alert_id} was retracted, so nothing needs to be acknowledged.",
            table=ALERT_TABLE,
            reason=RETRACTED,
            subject=alert_id,
            hint=f"Its entries: branchlake sda alerts --history {alert_id}",
        )
    return int(last["sequence"])


def report_acknowledgement(settings: Settings, acknowledgement: Acknowledgement) -> bool:
    """Report an acknowledgement to Dagster, as an observation of the asset `conjunction_alerts`.

    Returns False without a report if there is no Dagster instance: neither is `DAGSTER_HOME` set, nor does
    the state folder have an instance. The function does not create one.
    """
    if not os.environ.get("DAGSTER_HOME") and not (settings.state_dir / "dagster").is_dir():
        return False
    metadata: dict[str, MetadataValue[Any] | str | int] = {
        "alert_id": acknowledgement.alert_id,
        "sequence": acknowledgement.sequence,
        "subscriber": acknowledgement.subscriber,
        "acknowledged_at": MetadataValue.timestamp(acknowledgement.acknowledged_at),
        **({"note": acknowledgement.note} if acknowledgement.note else {}),
    }
    with open_instance(settings) as instance:
        instance.report_runless_asset_event(
            AssetObservation(
                AssetKey(ALERT_TABLE.split(".")), description="Alert acknowledged", metadata=metadata
            )
        )
    return True
