"""Events that belong to no run, many at once. Dagster's public call stores them one by one.

Each has transactions of its own there: to tell of ten thousand partitions took a minute, and takes 3 s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    EventLogEntry,
)
from dagster._core.events import AssetObservationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.sqlalchemy_compat import db_result
from dagster._time import get_current_timestamp

_log = logging.getLogger(__name__)


def report_observations(instance: DagsterInstance, observations: Sequence[AssetObservation]) -> None:
    """As `instance.report_runless_asset_event` for each of them, in their order.

    Those of an asset that follow each other are one statement in Postgres, and one transaction for each of
    the two databases in SQLite. One that fails may have been stored all the same, as with Dagster's own
    batches: it is told twice then, and never not at all.
    """
    storage = instance.event_log_storage
    for _, of_asset in groupby(observations, key=_asset):
        entries = [_entry(one) for one in of_asset]
        if type(storage) is SqliteEventLogStorage:
            _store(storage, entries)
        else:
            try:
                storage.store_event_batch(entries)
            except Exception as error:  # noqa: BLE001 - as Dagster does: a batch may be too large, one is not
                _log.warning("%d observations are stored one by one, not together: %s", len(entries), error)
                for entry in entries:
                    storage.store_event(entry)


def _asset(observation: AssetObservation) -> AssetKey:
    return observation.asset_key


def _entry(observation: AssetObservation) -> EventLogEntry:
    event = DagsterEvent(
        event_type_value=DagsterEventType.ASSET_OBSERVATION.value,
        event_specific_data=AssetObservationData(observation),
        job_name=RUNLESS_JOB_NAME,
    )
    return EventLogEntry(  # type: ignore[no-untyped-call]  # untyped upstream
        error_info=None,
        level=logging.INFO,
        user_message="",
        run_id=RUNLESS_RUN_ID,
        timestamp=get_current_timestamp(),
        job_name=RUNLESS_JOB_NAME,
        dagster_event=event,
    )


def _store(storage: SqliteEventLogStorage, entries: Sequence[EventLogEntry]) -> None:
    """What its `store_event` does for each: into the database of no run, and into that across runs."""
    statements = [storage.prepare_insert_event(entry) for entry in entries]
    with storage.run_connection(RUNLESS_RUN_ID) as conn:
        for statement in statements:
            conn.execute(statement)
    with storage.index_transaction() as conn:
        ids = []
        for statement in statements:
            with db_result(conn, statement) as result:
                ids.append(result.inserted_primary_key[0])
        storage._store_asset_event_tags(conn, entries, ids)
        storage._store_asset_event(conn, entries[-1], ids[-1])  # the asset's newest
