"""What a consumer has left, as metadata that Dagster shows and plots."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dagster import MetadataValue

from branchlake_dagster.incremental.backlog import Unconsumed

ROWS = "branchlake/unconsumed_rows"
FILES = "branchlake/unconsumed_files"
AGE_S = "branchlake/unconsumed_age_s"
LEFT = "branchlake/unconsumed"


def standing_metadata(found: Unconsumed, now: datetime) -> Mapping[str, Any]:
    """Of an observation: rows and files as numbers, the age of the oldest in seconds, all of it in words."""
    return {
        ROWS: MetadataValue.int(found.rows),
        FILES: MetadataValue.int(found.files),
        AGE_S: MetadataValue.float(round(found.age_s(now), 1)),
        LEFT: MetadataValue.text(found.text()),
    }
