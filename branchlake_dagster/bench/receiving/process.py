"""A receiver of its own process, and what it has landed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from branchlake_dagster.receivers.landing import LOG, Landing

COMMAND = "from branchlake_dagster.cli import main; main()"
_ANYWHERE = "127.0.0.1:0"


class Receiver:
    """A running `branchlake sda receive` with one source."""

    def __init__(
        self, process: subprocess.Popen[str], ready: dict[str, Any], landing: Path, quiet_s: float
    ) -> None:
        self._process, self._landing, self._quiet_s = process, Landing(landing), quiet_s
        ((where, self.address),) = ready["sources"].items()
        self._topic = where.rpartition("/")[0]
        self._usage = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Seconds of a processor that it has taken."""
        used = self._usage.cpu_times()
        return float(used.user + used.system)

    def settle(self, expected: int) -> None:
        """Wait until so many are in finished files, or nothing more comes."""
        before, since = -1, time.monotonic()
        while before < expected and time.monotonic() - since < self._quiet_s:
            if (now := self._landing.offsets(self._topic, 0)[1]) != before:
                before, since = now, time.monotonic()
            time.sleep(0.1)

    def end(self) -> dict[str, Any]:
        """End it; its own account."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=60)
        account: dict[str, Any] = json.loads(out.strip().splitlines()[-1])["intakes"][0]
        return account

    def files(self) -> Iterator[tuple[float, float, pa.Table]]:
        """Of each finished file when it was durable (seconds since 1970), its first receipt, and its rows."""
        closed = {}
        for line in (self._landing.topic_folder(self._topic) / LOG).read_text().splitlines():
            told = json.loads(line)
            if "first" in told:
                closed[told["first"]] = tuple(
                    datetime.fromisoformat(told[name]).timestamp() for name in ("closed", "opened")
                )
        for file in self._landing.files(self._topic, 0):
            yield *closed[file.first], pq.read_table(file.path, columns=["value"])

    def delays(self, sent_at: Any) -> npt.NDArray[np.float64]:
        """Seconds from sending to durable of each record; `sent_at` gives the nanoseconds in values."""
        parts = [closed - sent_at(table["value"]) / 1e9 for closed, _, table in self.files()]
        return np.concatenate(parts) if parts else np.zeros(0)


@contextmanager
def receiver(
    folder: Path, option: str, where: str = _ANYWHERE, *, roll_s: float, quiet_s: float
) -> Iterator[Receiver]:
    """A receiver that writes to `folder`; ended whatever happens."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", COMMAND, "receive", option, where),
            *("--landing", str(folder), "--roll-s", str(roll_s)),
            *("--monitor", _ANYWHERE, "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError(process.communicate()[1])
        yield Receiver(process, json.loads(line), folder, quiet_s)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
