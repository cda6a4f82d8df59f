"""A lease as it lies on `main`: who holds a name, and with which fencing token.

It is a namespace without tables, `branchlake.lease-{name}`, whose properties tell both. A grant is a commit
on `main`, of which Nessie lets one of several through, and a publication can ask in its own commit that the
grant still stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from branchlake_dagster.nessie.model import Content, ContentKey, Namespace, Put

HOME = "branchlake"
"""The namespace that holds them. Branches made from an empty `main` have it anyway."""
HOLDER = "branchlake.holder"
TOKEN = "branchlake.fencing_token"  # noqa: S105 - no password


def lease_key(name: str) -> ContentKey:
    """Where on `main` the lease of a name is."""
    return ContentKey([HOME, f"lease-{name}"])


@dataclass(frozen=True)
class Lease:
    """What `main` says of a name. `token` grows with each grant; `holder` is the branch of a run."""

    name: str
    token: int = 0
    holder: str | None = None

    @classmethod
    def of(cls, name: str, contents: Mapping[ContentKey, Content]) -> Lease:
        """The lease among contents; one that was never granted has token 0 and no holder."""
        found = contents.get(lease_key(name))
        if not isinstance(found, Namespace):
            return cls(name)
        told = found.properties.get(TOKEN, "")
        # A hand that broke the number must not make the next one smaller than one that was granted:
        # the holder is compared as well, so a token that begins anew fences nobody in.
        return cls(name, int(told) if told.isdigit() else 0, found.properties.get(HOLDER))

    def granted_to(self, branch: str) -> Lease:
        """The next grant."""
        return Lease(self.name, self.token + 1, branch)

    def puts(self, contents: Mapping[ContentKey, Content]) -> list[Put]:
        """The operations that bring it to `main`, which holds `contents`."""
        key, home = lease_key(self.name), ContentKey([HOME])
        before = contents.get(key)
        told = {
            "comment": f"who may publish what is exclusive as {self.name!r}; no tables",
            HOLDER: self.holder or "",
            TOKEN: str(self.token),
        }
        found = [Put(key, Namespace(before.content_id if before else None, key.elements, told))]
        return found if home in contents else [Put(home, Namespace(None, home.elements)), *found]


def lease_keys(names: Iterable[str]) -> list[ContentKey]:
    """What is to be read of `main` to tell these leases and to grant them."""
    return [ContentKey([HOME]), *(lease_key(name) for name in names)]
