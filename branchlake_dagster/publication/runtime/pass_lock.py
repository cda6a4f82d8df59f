"""One pass over a lake at a time, on one machine.

Dagster gives a tick 60 s, then starts the next one and lets the old one run on beside it. Passes may meet:
what they do to the lake is exactly once. But they do it all twice, and four publications were told twice.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from branchlake_dagster.settings import Settings


@contextmanager
def one_pass(settings: Settings) -> Iterator[bool]:
    """Whether the pass is ours; another one of this machine may be at work, in this process or elsewhere.

    The lock is the kernel's, so it ends with its process, however that ends.
    """
    lake = f"{settings.nessie_uri} {settings.warehouse_uri}"
    name = f"publication-{hashlib.sha256(lake.encode()).hexdigest()[:16]}.lock"
    folder = settings.state_dir / "run"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
