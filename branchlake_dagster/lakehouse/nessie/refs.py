"""Reference arguments: `name`, `name@hash`, `@hash` or a bare 64-character hash.

The rules for names and hashes are pynessie's, which took them from Nessie's own `Validation` class. Only
the bare hash is stricter here: pynessie reads every name of eight or more hex digits as a hash, so that a
branch called `feedface` could not be reached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from branchlake_dagster.lakehouse.nessie.errors import NessieRefused

_FULL_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class RefArgument:
    """A parsed reference argument; `name` is empty for a detached hash, `hash` None for "its head"."""

    name: str
    hash: str | None

    @property
    def path(self) -> str:
        """The URL path segment that Nessie's API v2 understands."""
        return quote(self.name, safe="") + (f"@{self.hash}" if self.hash else "")


def parse_ref(ref: str) -> RefArgument:
    """Read a reference argument; raises NessieRefused when it can be none."""
    # Late: pynessie takes 0.4 s to import, which a process that never speaks to Nessie need not spend.
    from branchlake_dagster.lakehouse.nessie.pynessie_parts import (
        is_valid_hash,
        is_valid_reference_name,
        split_into_reference_and_hash,
    )

    if _FULL_HASH.fullmatch(ref):
        return RefArgument("", ref.lower())
    if ref.startswith("@") and is_valid_hash(ref[1:]):
        return RefArgument("", ref[1:].lower())
    if "@" in ref:
        name, at = split_into_reference_and_hash(ref)
        if at:
            return RefArgument(name, at.lower())
    elif is_valid_reference_name(ref):
        return RefArgument(ref, None)
    raise NessieRefused(
        f"{ref!r} is no Nessie reference.",
        hint="Give a branch or tag name (letters, digits and . / _ -), name@hash or a hash.",
        reason="reference_name",
        subject=ref,
    )


def parse_name(ref: str) -> str:
    """A plain branch or tag name; raises NessieRefused for a hash or a name with one."""
    parsed = parse_ref(ref)
    if parsed.hash or not parsed.name:
        raise NessieRefused(
            f"{ref!r} carries a hash where a plain branch or tag name is needed.",
            reason="hash_in_name",
            subject=ref,
        )
    return parsed.name
