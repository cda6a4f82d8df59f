"""Whether the code that a process has imported is still the code in the files."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def imported_sources(
    modules: Iterable[ModuleType], *, began_ns: int, ended_ns: int
) -> dict[Path, Stamp | None]:
    """The files of imported modules that a user may edit: not those of installed packages.

    A file that was written while the imports went on (two times of `time.time_ns`) has no stamp: nobody knows
    which of its versions was read, so it counts as changed.
    """
    found: dict[Path, Stamp | None] = {}
    for module in modules:
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and not name.startswith(_INSTALLED):
            stamp = _stamp(path := Path(name))
            if stamp is not None:
                found[path] = None if began_ns <= stamp[0] <= ended_ns else stamp
    return found


def changed(known: Mapping[Path, Stamp | None]) -> list[Path]:
    """Those of the files that were written or deleted since."""
    return [path for path, stamp in known.items() if stamp is None or _stamp(path) != stamp]


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
