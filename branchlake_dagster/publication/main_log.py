"""What became of branches on `main`: published, merged by hand, or left behind by a roll-back.

`main`'s log answers that, and it grows for ever: looking through 12,000 commits took 1.7 s for each branch.
A commit's hash stands for all that is before it, so what was read once stays true. The log is read once per
process, back to the oldest base that anybody asks for, and afterwards only what is new.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.publication.ledger import Published, publications_in

_MOST = 200_000
"""Commits that are remembered; about 200 bytes each, 320 with a publication."""


class BaseNotOnMain(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` does not hold the commit that a run started from: it was rolled back, or restored."""


class MainLog:
    """`main`'s commits as far back as they were asked for. Safe to share between threads.

    It holds no connection: one process asks it about one lake through many clients.
    """

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._chain: deque[str] = deque()
        """Hashes of one line of commits, oldest first."""
        self._low = 0
        """The place of the oldest one; places only ever mean an order."""
        self._places: dict[str, int] = {}
        self._whole = False
        """Whether the oldest one is the first commit there is."""
        self._publications: dict[str, int] = {}
        """Places by branch."""
        self._merged: dict[str, int] = {}
        """Places by the hash that a merge took in; of merges that are no publications."""

    def already_published(
        self, client: NessieClient, branch: str, *, base: str, at: str, head: str | None = None
    ) -> Published | None:
        """How a branch, made from the commit `base`, came to `main` up to the commit `at`; None: it did not.

        `head`: its hash; with it a merge by somebody else counts too. Raises BaseNotOnMain.
        """
        with self._lock:
            start, end = self._span(client, base, at)
            place = self._publications.get(branch, start)
            if start < place <= end:
                return Published(self._chain[place - self._low], now=False)
            taken = self._merged.get(head or "", start)
            if start < taken <= end:
                return Published(self._chain[taken - self._low], now=False, by_hand=True)
            return None

    def on_main(
        self, client: NessieClient, branch: str, *, base: str, head: str | None = None
    ) -> Published | None:
        """The same for `main` as it is now. None too when it has lost the base; the publisher says so."""
        try:
            at = client.reference(MAIN).hash
            return self.already_published(client, branch, base=base, head=head, at=at)
        except BaseNotOnMain:
            return None

    def holds(self, client: NessieClient, base: str) -> bool:
        """Whether the commit is in `main`'s history now."""
        at = client.reference(MAIN).hash
        try:
            with self._lock:
                self._span(client, base, at)
        except BaseNotOnMain:
            return False
        return True

    def merges(self, client: NessieClient, *, base: str, at: str) -> dict[str, str]:
        """The merges by hand after the commit `base` up to `at`, by the hash that each took in."""
        with self._lock:
            start, end = self._span(client, base, at)
            found = {source: place for source, place in self._merged.items() if start < place <= end}
            return {source: self._chain[place - self._low] for source, place in found.items()}

    # -- reading ---------------------------------------------------------------------------------------

    def _span(self, client: NessieClient, base: str, at: str) -> tuple[int, int]:
        """The places of two commits, after reading whatever it takes to know them."""
        if at not in self._places:
            self._reach(client, at, base)
        if base not in self._places and not self._whole:
            self._lengthen(client, base)
        if base not in self._places or self._places[base] > self._places[at]:
            raise BaseNotOnMain(
                f"Main no longer holds the commit {base[:16]} from which the run started:"
                " it was rolled back, or restored from a backup.",
                hint="Launch the run anew; it will start from today's main.",
            )
        span = self._places[base], self._places[at]
        self._trim(keep=span[0])
        return span

    def _reach(self, client: NessieClient, at: str, base: str) -> None:
        """Know `at`: what is new since the newest commit that is known, or all of another history."""
        newest = self._chain[-1] if self._chain else base
        new: list[LogEntry] = []
        try:
            new += client.log(f"@{at}", since=newest)
        except ReferenceNotFound:
            # Rolled back or restored: the known commits after the fork are no longer main's.
            new.clear()
            for entry in client.log(f"@{at}"):
                if entry.commit.hash in self._places:
                    newest = entry.commit.hash
                    break
                new.append(entry)
            else:
                self._forget()
                self._append(new)
                self._whole = True
                return
        if not self._chain:
            self._chain.append(newest)
            self._places[newest] = self._low
        self._cut(after=newest)
        self._append(new)

    def _append(self, newest_first: list[LogEntry]) -> None:
        for entry in reversed(newest_first):
            place = self._low + len(self._chain)
            self._chain.append(entry.commit.hash)
            self._note(entry, place)

    def _lengthen(self, client: NessieClient, base: str) -> None:
        """Go back to `base`, or to the first commit."""
        older: Iterator[LogEntry] = client.log(f"@{self._chain[0]}")
        itself = next(older, None)
        if itself is not None:
            self._note(itself, self._low)  # the oldest one may be known by its hash alone
        for entry in older:
            self._low -= 1
            self._chain.appendleft(entry.commit.hash)
            self._note(entry, self._low)
            if entry.commit.hash == base:
                return
        self._whole = True

    def _note(self, entry: LogEntry, place: int) -> None:
        self._places[entry.commit.hash] = place
        ours = publications_in(entry)
        self._publications |= {one.branch: place for one in ours}
        if not ours:
            self._merged |= dict.fromkeys(entry.commit.parent_hashes[1:], place)

    # -- forgetting ------------------------------------------------------------------------------------

    def _cut(self, *, after: str) -> None:
        last = self._places[after]
        while self._low + len(self._chain) - 1 > last:
            del self._places[self._chain.pop()]
        self._publications = {name: place for name, place in self._publications.items() if place <= last}
        self._merged = {source: place for source, place in self._merged.items() if place <= last}

    def _trim(self, *, keep: int) -> None:
        """Forget the oldest commits when there are too many, but for those after the place `keep`."""
        if len(self._chain) <= self._most or keep - self._low < self._most // 2:
            return
        while self._low < keep:
            del self._places[self._chain.popleft()]
            self._low += 1
        self._whole = False
        self._publications = {name: place for name, place in self._publications.items() if place > self._low}
        self._merged = {source: place for source, place in self._merged.items() if place > self._low}
