"""`main`'s history as far back as it is needed: where a branch left it, and what was published since."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.stored_names import LakeProperty

_STRIDE = 200
"""Commits of `main` read for each commit of a branch: `main` may have moved on by thousands."""


class MainHistory:
    """The log of `main`, newest first, read once and as it is asked for."""

    def __init__(self, client: NessieClient) -> None:
        self._client = client
        self._rest = iter(client.log(MAIN))
        self._entries: list[LogEntry] = []
        self._places: dict[str, int] = {}

    def _read(self, count: int) -> bool:
        more = list(islice(self._rest, count))
        for entry in more:
            self._places[entry.commit.hash] = len(self._entries)
            self._entries.append(entry)
        return bool(more)

    def base_of(self, ref: str) -> str | None:
        """The newest commit of `ref` that is one of `main`'s too; None when they share none.

        Commits are compared along first parents, so a published branch still has its old base.
        """
        passed: list[str] = []
        for entry in self._client.log(ref):
            passed.append(entry.commit.hash)
            self._read(_STRIDE)
            if (found := self._first(passed)) is not None:
                return found
        while self._read(_STRIDE):
            if (found := self._first(passed)) is not None:
                return found
        return self._first(passed)

    def _first(self, hashes: list[str]) -> str | None:
        return next((one for one in hashes if one in self._places), None)

    def published_since(self, base_hash: str) -> set[str]:
        """The ids of the runs that the ledger names after `base_hash`, which `base_of` has found."""
        since = self._entries[: self._places[base_hash]]
        named = (entry.commit.properties.get(LakeProperty.RUN_ID, "") for entry in since)
        return {run_id for listed in named for run_id in listed.split(",") if run_id}

    def time_of(self, base_hash: str) -> datetime | None:
        """When `base_hash`, which `base_of` has found, was committed, by Nessie's clock."""
        return self._entries[self._places[base_hash]].commit.commit_time
