"""Types of command options that several commands use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click


class Moment(click.ParamType[datetime]):
    """An option with a time in ISO 8601. A time without a zone is in UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time with its time zone."""
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time: write it as 2026-11-20T12:00.", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
