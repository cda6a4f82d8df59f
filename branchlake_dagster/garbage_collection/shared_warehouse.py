"""Refuse to delete files of a warehouse in which another Nessie repository may have tables."""

from __future__ import annotations

from branchlake_dagster.catalog.recorded_repositories import RecordedRepository
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles


class WarehouseShared(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The warehouse may have files of another Nessie repository, so none of its files are deleted.

    `subject` is the file in the warehouse that records this repository.
    """


def require_sole_repository(files: WarehouseFiles, created_at: str | None) -> None:
    """Raise WarehouseShared unless all repositories that are recorded in the warehouse are this one.

    `created_at` is the creation time of this repository; None if Nessie does not report it. Files that cannot
    be parsed count as those of another repository. Costs one listing of the storage, and one request for each
    recorded repository. Raises WarehouseUnreadable.
    """
    for recorded in files.load_repositories():
        if not recorded.created_at:
            raise WarehouseShared(
                f"{recorded.location} cannot be parsed. It records a Nessie repository with tables in this"
                " warehouse.",
                reason="damaged_record",
                subject=recorded.location,
                hint="Nothing was deleted. If only one Nessie repository has tables in this warehouse, delete"
                " that file: its next writer writes the file again.",
            )
        if recorded.created_at != created_at:
            raise WarehouseShared(
                f"The warehouse has files of {_describe(recorded)}. That is not the repository of this lake,"
                f" which was created at {created_at or 'an unknown time'}.",
                reason="other_repository",
                subject=recorded.location,
                hint="Nothing was deleted, and plans stay open. Give each repository its own warehouse. If"
                " the other one does not exist any more, and you do not need its tables, delete"
                f" {recorded.location} and run the collection again.",
            )


def _describe(recorded: RecordedRepository) -> str:
    details = [
        f"{label} {value}"
        for label, value in (
            ("address", recorded.nessie_uri),
            ("used on host", recorded.host),
            ("recorded at", recorded.recorded_at),
        )
        if value
    ]
    suffix = f" ({', '.join(details)})" if details else ""
    return f"the Nessie repository that was created at {recorded.created_at}{suffix}"
