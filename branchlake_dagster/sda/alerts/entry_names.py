"""The constant values in entries of the log of alerts. Importing them does not import Spark."""

from __future__ import annotations

INSERT, RETRACT = ENTRY_KINDS = ("insert", "retract")
HIGH, MEDIUM, LOW = PRIORITIES = ("high", "medium", "low")
NEW, CORRECTED, CANCELED, EXPECTED_AGAIN = REASONS = ("new", "corrected", "canceled", "expected again")

ALERT_TABLE = "sda.conjunction_alerts"
"""The dotted name of the log's table."""
