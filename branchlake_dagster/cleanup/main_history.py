"""Read the history of `main` as far back as needed: where a branch left it, and what was published since."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.stored_names import LakeProperty

_BATCH_SIZE = 200
"""Commits of `main` to read per commit of a branch, because `main` may be thousands of commits ahead."""


class MainHistory:
    """The log of `main`, newest first. It is read once, on demand."""

    def __init__(self, client: NessieClient) -> None:
        self._client = client
        self._rest = iter(client.log(MAIN))
        self._entries: list[LogEntry] = []
        self._positions: dict[str, int] = {}

    def _read_entries(self, count: int) -> bool:
        more = list(islice(self._rest, count))
        for entry in more:
            self._positions[entry.commit.hash] = len(self._entries)
            self._entries.append(entry)
        return bool(more)

    def find_base(self, ref: str) -> str | None:
        """Find the newest commit of `ref` that `main` has too. None if they share no commit.

        Commits are compared along first parents, so a published branch still has its old base.
        """
        ref_hashes: list[str] = []
        for entry in self._client.log(ref):
            ref_hashes.append(entry.commit.hash)
            self._read_entries(_BATCH_SIZE)
            if (base_hash := self._first_on_main(ref_hashes)) is not None:
                return base_hash
        while self._read_entries(_BATCH_SIZE):
            if (base_hash := self._first_on_main(ref_hashes)) is not None:
                return base_hash
        return self._first_on_main(ref_hashes)

    def _first_on_main(self, hashes: list[str]) -> str | None:
        return next((hash_ for hash_ in hashes if hash_ in self._positions), None)

    def run_ids_published_since(self, base_hash: str) -> set[str]:
        """Return the ids of the runs that the ledger names after `base_hash`, a result of `find_base`."""
        entries = self._entries[: self._positions[base_hash]]
        run_id_lists = (entry.commit.properties.get(LakeProperty.RUN_ID, "") for entry in entries)
        return {run_id for run_ids in run_id_lists for run_id in run_ids.split(",") if run_id}

    def commit_time(self, base_hash: str) -> datetime | None:
        """Return when `base_hash`, a result of `find_base`, was committed, by Nessie's clock."""
        return self._entries[self._positions[base_hash]].commit.commit_time
