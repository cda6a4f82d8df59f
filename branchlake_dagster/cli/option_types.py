"""Types of command options that several commands use."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click


class Moment(click.ParamType[datetime]):
    """An option with a time in ISO 8601, from 1957 to 2262. A time without a zone is in UTC.

    If a command has the options `--since` and `--until`, `--since` must not be later.
    """

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time in UTC."""
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time: write it as 2026-11-20T12:00.", param, ctx)
        if not 1957 <= moment.year < 2262:  # from the first satellite to the end of 64-bit nanoseconds
            self.fail(f"{value!r} is not a time between 1957 and 2262.", param, ctx)
        moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
        # Either option may be given first, so each is compared with the other one.
        limits = {**(ctx.params if ctx else {}), **({param.name: moment} if param else {})}
        since, until = limits.get("since"), limits.get("until")
        if since is not None and until is not None and since > until:
            self.fail("--since is later than --until.", param, ctx)
        return moment


class NamedFolder(click.Path):
    """A folder, as an absolute path. Unlike `click.Path`, it refuses an empty text."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not str(value):
            self.fail("the name of the folder is empty.", param, ctx)
        return Path(os.fsdecode(super().convert(value, param, ctx))).absolute()


class FiniteRange(click.FloatRange):
    """An option with a number in a range. Unlike `click.FloatRange`, it refuses `inf` and `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if number is not None and not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
