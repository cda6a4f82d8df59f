"""One pass over a lake at a time, on one machine.

Dagster gives a tick 60 s, then starts the next one and lets the old one run on beside it. Passes may meet:
what they do to the lake is exactly once. But they do it all twice, and four publications were told twice.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from branchlake_dagster.settings import Settings

_LOOK_S = 0.02


@contextmanager
def one_pass(
    settings: Settings,
    *,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Whether the pass is ours; another one of this machine may be at work, in this process or elsewhere.

    It waits `patience_s` seconds for that other one. The lock is the kernel's, so it ends with its process,
    however that ends.
    """
    name = f"publication-{settings.lake_id}.lock"
    until = clock() + patience_s
    folder = settings.state_dir / "run"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() >= until:
                    yield False
                    return
                sleep(_LOOK_S)
        yield True
