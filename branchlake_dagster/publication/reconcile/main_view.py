"""What `main` shows of tables and commits, for those who look at Dagster's pages."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

from cachetools import LRUCache, cachedmethod
from cachetools.keys import hashkey
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.branching.table.provenance import row_count
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.web_page import commit_page
from branchlake_dagster.nessie.model import ContentKey

_log = logging.getLogger(__name__)
_REMEMBERED = 200


class MainView:
    """Looks into the lake. A commit never changes, so what was counted at one is remembered."""

    def __init__(self, lake: Lakehouse) -> None:
        self._lake = lake
        self._counted: LRUCache[tuple[object, ...], int | None] = LRUCache(_REMEMBERED)

    def rows(self, tables: Collection[str], commit: str | None) -> Mapping[str, int | None]:
        """The rows of each table on `main` at `commit` (None: now), by dotted name.

        0 of a table that is not there, None where it cannot be told from metadata.
        """
        count = self._count if commit is None else partial(self._remembered, commit=commit)
        return {table: count(table) for table in tables}

    def page(self, commit: str) -> str | None:
        """The address of a commit's web page; None where there is none that a browser could open."""
        return commit_page(self._lake.endpoints(spark=False), self._lake.settings, commit)

    @cachedmethod(lambda self: self._counted, key=lambda _, table, commit: hashkey(table, commit))
    def _remembered(self, table: str, commit: str) -> int | None:
        return self._count(table, commit)

    def _count(self, table: str, commit: str | None = None) -> int | None:
        catalog = self._lake.catalog(f"{MAIN}@{commit}" if commit else MAIN)
        try:
            return row_count(catalog.load_table(ContentKey.from_path(table).elements))
        except NoSuchTableError:
            return 0
        except Exception as error:  # noqa: BLE001 - what became of the run is told without it
            _log.warning("The rows of %s on main could not be counted: %s", table, error)
            return None
