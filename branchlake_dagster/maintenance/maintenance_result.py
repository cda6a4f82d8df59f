"""The parts of the maintenance, and the plan and the result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from branchlake_dagster.compaction.compaction_plan import CompactionPlan
from branchlake_dagster.compaction.result import CompactionResult
from branchlake_dagster.expiry.manifest_rewrite import RewrittenManifests
from branchlake_dagster.expiry.result import ExpiryPlan, ExpiryResult
from branchlake_dagster.garbage_collection.collection_plan import CollectionPlan, CollectionResult


class MaintenancePart(StrEnum):
    """A part of the maintenance of a lake."""

    COMPACTION = "compaction"
    """Small files and delete files are rewritten, on Spark."""
    EXPIRY = "expiry"
    """Old snapshots are removed from the metadata of tables, and small manifests are merged."""
    COLLECTION = "collection"
    """Files that no reference can read are planned for deletion, and deleted a day later."""


ALL_PARTS = tuple(MaintenancePart)


@dataclass(frozen=True)
class MaintenancePlan:
    """The plan of a maintenance run. A part is None if it was not requested or failed; see `errors`."""

    compaction: CompactionPlan | None = None
    expiry: ExpiryPlan | None = None
    collection: CollectionPlan | None = None
    errors: Mapping[MaintenancePart, Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class MaintenanceResult:
    """The result of a maintenance run.

    A part is None if it was not requested, did not begin, or failed as a whole; `errors` has the error of a
    failed part. Errors of single tables are in the parts' results. `manifests` are the tables whose manifests
    the expiry merged or failed to merge.
    """

    compaction: CompactionResult | None = None
    expiry: ExpiryResult | None = None
    manifests: tuple[RewrittenManifests, ...] = ()
    collection: CollectionResult | None = None
    errors: Mapping[MaintenancePart, Exception] = field(default_factory=dict)

    @property
    def failures(self) -> Mapping[MaintenancePart, bool]:
        """For each part that ran: whether it, or one of its tables or files, failed.

        A collection also failed if it deleted nothing because a metadata file is missing or damaged, or if
        the journal of a plan does not match.
        """
        failures = dict.fromkeys(self.errors, True)
        if self.compaction is not None:
            failures[MaintenancePart.COMPACTION] = bool(self.compaction.errors)
        if self.expiry is not None:
            has_failed_manifests = any(table.error is not None for table in self.manifests)
            failures[MaintenancePart.EXPIRY] = (
                MaintenancePart.EXPIRY in self.errors or bool(self.expiry.errors) or has_failed_manifests
            )
        if self.collection is not None:
            executed = self.collection.executed
            failures[MaintenancePart.COLLECTION] = (
                bool(self.collection.plan.metrics.unreadable_states)
                or any(one.state == "damaged" for one in executed)
                or any(one.failed for one in executed)
            )
        return failures

    @property
    def has_failed(self) -> bool:
        """Whether any part, or one of its tables or files, failed."""
        return any(self.failures.values())
