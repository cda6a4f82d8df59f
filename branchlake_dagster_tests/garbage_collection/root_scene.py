"""A lake in which each file is reachable by exactly one kind of root, or by none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.statistics import PartitionStatisticsFile, StatisticsFile
from pyiceberg.table.update import SetPartitionStatisticsUpdate
from pyiceberg.typedef import Record

from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import SnapshotExpirer
from branchlake_dagster.history.capture import current_position
from branchlake_dagster.incremental.change_tables import build_change_table
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.internals.pyiceberg import commit_files, write_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, OtherContent, Put
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.runs.temporary_tags import keep_commit
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX, LakeProperty, ReferencePrefix
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, open_lake
from branchlake_dagster_tests.publication.rebase.deleting import _Deleting

WRITER = "run-00000000-0000-4000-8000-000000000001"
_BRANCHES = {
    WRITER: "branch of an open run",
    "publish-00000000-0000-4000-8000-000000000002": "branch of a publication",
    "compact-00000000-0000-1000-8000-000000000003": "branch of a compaction",
    "of-a-stranger": "branch of a stranger",
}
_TAG_PREFIXES = {
    ReferencePrefix.DISCARDED: "tag of a discarded run",
    ReferencePrefix.SWEEPING: "tag of a sweeper",
    ReferencePrefix.CLAIM: "tag of a judged run",
}


def describe_file(path: str, content: DataFileContent = DataFileContent.DATA) -> DataFile:
    """Return a file's entry: the collector never opens data files, so these have one byte."""
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1,
    )
    file.spec_id = 0
    return file


class RootScene:
    """A lake with `per_kind` files of each kind. `kept` and `orphans` map a kind to the paths of its files.

    Use it as a context manager, which ends the leases of readers.
    """

    def __init__(self, folder: Path, seed: int, per_kind: int) -> None:
        self.random = random.Random(seed)
        self.per_kind = per_kind
        self.lake = open_lake(folder)
        self.kept: dict[str, set[str]] = {}
        self.orphans: dict[str, set[str]] = {}
        self._spellings: dict[str, str] = {}
        self._leases = ExitStack()
        self._ended_tags: set[str] = set()
        self._build()

    def __enter__(self) -> RootScene:
        return self

    def __exit__(self, *_: object) -> None:
        self._leases.close()

    # -- results ---------------------------------------------------------------------------------------

    @property
    def file_count(self) -> int:
        """The number of files of all kinds, without metadata."""
        return sum(len(paths) for kinds in (self.kept, self.orphans) for paths in kinds.values())

    def count_lost(self, deleted: set[str]) -> dict[str, int]:
        """Return the number of deleted files of each kind that has a root."""
        return _count({kind: paths & deleted for kind, paths in self.kept.items()})

    def count_left(self, deleted: set[str]) -> dict[str, int]:
        """Return the number of files of each kind without a root that were not deleted."""
        return _count({kind: paths - deleted for kind, paths in self.orphans.items()})

    def find_unreachable_metadata(self) -> set[str]:
        """Return the metadata files, manifest lists and manifests that no live commit leads to.

        They are found by PyIceberg and by a listing at each live commit.
        """
        nessie, cutoff, locations = self.lake.nessie, datetime.now(UTC) - 31 * DAY, set[str]()
        for ref in nessie.references():
            if ref.name in self._ended_tags:
                continue
            for entry in nessie.log(f"@{ref.hash}"):
                listing = nessie.entries(f"@{entry.commit.hash}", fetch_content=True)
                contents = [each.content for each in listing]
                locations |= {one.metadata_location for one in contents if isinstance(one, IcebergTable)}
                if entry.commit.commit_time is not None and entry.commit.commit_time < cutoff:
                    break  # the state at the horizon
        reachable = set(locations)
        for location in locations:
            table = StaticTable.from_metadata(location)
            for snapshot in table.metadata.snapshots:
                reachable |= {snapshot.manifest_list, *_manifest_paths(table, snapshot.snapshot_id)}
        existing = {path for path in self.lake.files() if "/metadata/" in path}
        return existing - {path.removeprefix("file://") for path in reachable}

    def change_table_files(self) -> set[str]:
        """Return the files of change tables, which lie below `_branchlake`."""
        return {
            str(path) for path in (self.lake.root / "_branchlake" / "changes").rglob("*") if path.is_file()
        }

    # -- files -----------------------------------------------------------------------------------------

    def _files(self, kind: str, folder: Path, *, is_kept: bool = True) -> list[str]:
        """Write the files of a kind into a table's folder, under names that engines use."""
        paths = []
        for number in range(self.per_kind):
            partition = self.random.choice(["", "day=2026-01-01/", "name=a b/", "_p=x%20y/", "0101/1100/"])
            name = f"{number:05}-{kind}-{self.random.getrandbits(40):x}.parquet".replace(" ", "-")
            paths.append(self.lake.write(folder / "data" / partition / name))
        (self.kept if is_kept else self.orphans)[kind] = set(paths)
        return paths

    def _orphans(self, kind: str, folder: Path) -> list[str]:
        return self._files(kind, folder, is_kept=False)

    def _spell(self, path: str) -> str:
        """Return another spelling of a path, and remember it: manifests have the same for one file."""
        spell: Callable[[str], str] = self.random.choice(
            [
                lambda one: f"file:{one}",
                lambda one: f"file://{one}",
                lambda one: one,
                lambda one: f"file:{one.replace(' ', '%20')}",
                lambda one: f"FILE://{one.replace('/data/', '//data/')}",
            ]
        )
        self._spellings[path] = spell(path)
        return self._spellings[path]

    def _add(self, table: Table, paths: list[str], removed: list[str] | None = None) -> None:
        commit_files(
            table,
            added=[describe_file(self._spell(path)) for path in paths],
            removed=[describe_file(self._spellings[path]) for path in removed or ()],
            properties={},
        )

    def _create(self, *names: str) -> None:
        for name in names:
            self.lake.create(name)
            self.folders[name] = self.lake.table_folder(name)

    def _expire(self, name: str) -> None:
        """Remove all snapshots but the newest one."""
        table = self.lake.table(name)
        expired_ids = [one.snapshot_id for one in table.metadata.snapshots[:-1]]
        table.maintenance.expire_snapshots().by_ids(expired_ids).commit()

    def _days_ago(self, days: float) -> None:
        self.lake.at(datetime.now(UTC) - days * DAY)

    def _main_hash(self) -> str:
        return self.lake.nessie.reference(MAIN).hash

    # -- the scene -------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.folders: dict[str, Path] = {}
        self._build_tags()
        self._build_old_states()
        self._build_expired_tables()
        self._build_horizon()
        self._build_branches()
        self._build_main()
        lake, folder = self.lake, self.folders["t"]
        written_lately = self._files("living writer", folder)
        young = self._files("young", folder)
        self._orphans("none", folder)
        self._orphans("none, dropped table", self.folders["dropped"])
        self._hide(self._files("hidden", folder))
        self._files("folder of no table", lake.root / "exports")
        lake.age(60)
        lake.age(15, only=written_lately)
        lake.age(6, only=young)
        lake.heartbeats.beat(WRITER)

    def _build_tags(self) -> None:
        """Tags of users keep what they name, and all snapshots of its metadata."""
        lake = self.lake
        self._days_ago(120)
        self._create("t", "u", "dropped")
        main_of_old = self._files("tag, older snapshot", self.folders["t"])
        self._add(lake.table(), main_of_old)
        tagged = self._files("tag", self.folders["t"])
        self._add(lake.table(), tagged)
        lake.tag("release-1")
        self._add(lake.table(), [], removed=[*main_of_old, *tagged])
        self._expire("t")
        self._add(lake.table("dropped"), self._files("dropped table of a tag", self.folders["dropped"]))
        lake.tag("before-drop")
        lake.lake.catalog().drop_table((lake.namespace, "dropped"))
        self._days_ago(100)
        gone = self._orphans("expired commit", self.folders["u"])
        self._add(lake.table("u"), gone)
        self._add(lake.table("u"), [], removed=gone)
        self._expire("u")

    def _build_old_states(self) -> None:
        """Leases of readers, and of a restoration, keep states that are older than the horizon."""
        lake = self.lake
        self._days_ago(95)
        self._create("held", "restored")
        held = self._files("lease of a reader", self.folders["held"])
        self._add(lake.table("held"), held)
        held_hash = self._main_hash()
        released = self._orphans("ended lease of a reader", self.folders["held"])
        self._add(lake.table("held"), released, removed=held)
        ended = datetime.now(UTC) - 3 * DAY
        ended_tag = f"{ReferencePrefix.READING}{ended:%Y%m%dT%H%M%SZ}-00000000-0000-4000-8000-000000000004"
        self._ended_tags.add(lake.tag(ended_tag))
        self._add(lake.table("held"), [], removed=released)
        self._expire("held")
        self._add(lake.table("restored"), self._files("restoration of a table", self.folders["restored"]))
        restored_hash = self._main_hash()
        lake.lake.catalog().drop_table((lake.namespace, "restored"))
        self._leases.enter_context(LakeReader(lake.lake).hold_state(at=held_hash))
        self._leases.enter_context(
            keep_commit(
                lake.nessie, ReferencePrefix.UNDROP, restored_hash, from_ref=MAIN, lifetime=timedelta(days=1)
            )
        )

    def _build_expired_tables(self) -> None:
        """Expiries kept one snapshot for a position, and one for an undo. No commit of the horizon has them."""
        lake = self.lake
        cases = {"source": "position of a consumer", "undone": "horizon of undo"}
        self._days_ago(60)
        self._create(*cases, "copy")
        for name, kind in cases.items():
            earlier = self._orphans(f"before the {kind}", self.folders[name])
            self._add(lake.table(name), earlier)
            self._days_ago(58)
            needed = self._files(kind, self.folders[name])
            self._add(lake.table(name), needed, removed=earlier)
        record = ConsumptionRecord({f"{lake.namespace}.source": current_position(lake.table("source"))})
        with lake.table("copy").transaction() as transaction:
            transaction.set_properties({LakeProperty.CONSUMED: record.to_json()})
        self._days_ago(57)
        for name, kind in cases.items():
            self._add(lake.table(name), [], removed=sorted(self.kept[kind]))
        self._days_ago(50)
        for name, undo_age in (("source", timedelta(0)), ("undone", 57.5 * DAY)):
            policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=undo_age)
            expirer = SnapshotExpirer.of_lake(lake.lake)
            result = expirer.run(expirer.plan([f"{lake.namespace}.{name}"], policy))
            assert not result.errors

    def _build_horizon(self) -> None:
        """Earlier commits of the last 30 days are roots, and the state at their beginning is one."""
        lake = self.lake
        self._days_ago(45)  # the state at the horizon: no younger commit names a file of this table
        self._create("last")
        self._add(lake.table("last"), self._files("state at the horizon", self.folders["last"]))
        self._days_ago(40)
        self._create("w")
        self._days_ago(20)
        lake.lake.catalog().drop_table((lake.namespace, "last"))
        for name in ("source", "undone"):  # a commit of the horizon has their metadata
            with lake.table(name).transaction() as transaction:
                transaction.set_properties({"touched": "yes"})
        commit = self._files("commit within the horizon", self.folders["t"])
        self._add(lake.table(), commit)
        self._add(lake.table(), [], removed=commit)
        self._expire("t")
        self._expire("u")

    def _build_branches(self) -> None:
        lake, folder = self.lake, self.folders["u"]
        borrowed = self._files("change table", folder)  # of an input that does not have them any more
        for name, kind in _BRANCHES.items():
            lake.branch(name)
            self._add(lake.table("u", name), self._files(kind, folder))
        self._register_change_table(borrowed)
        for number, (prefix, kind) in enumerate(_TAG_PREFIXES.items()):
            identifier = f"00000000-0000-4000-8000-00000000010{number}"
            branch = lake.branch(f"{ReferencePrefix.RUN}{identifier}")
            self._add(lake.table("t", branch), self._files(kind, self.folders["t"]))
            lake.tag(f"{prefix}{identifier}", branch)
            lake.delete(branch)

    def _register_change_table(self, paths: list[str]) -> None:
        """Register a change table on the branch of the open run, as `ChangeTables` does."""
        lake = self.lake
        name = lake.namespace, f"u{CHANGE_TABLE_INFIX}copy_0"
        change_table = build_change_table(
            lake.table("u", WRITER),
            [describe_file(self._spell(path)) for path in paths],
            name=name,
            location=f"{lake.lake.settings.warehouse_uri}/_branchlake/changes/{name[-1]}",
            change_of=f"{lake.namespace}.u",
            properties={},
        )
        catalog, metadata = lake.lake.catalog(WRITER), change_table.table.metadata
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(0)
        write_metadata(catalog, metadata, change_table.table.io, location)
        catalog.register_table(name, location)

    def _build_main(self) -> None:
        lake, folder = self.lake, self.folders["t"]
        self._add(lake.table(), self._files("head of main", folder))
        self._add(lake.table("u"), self._files("another table", folder))
        self._commit_delete_files(lake.table("u"), self._files("delete files", self.folders["u"]))
        self._commit_statistics(self._orphans("statistics of nothing", folder))
        self._commit_contents()

    def _commit_delete_files(self, table: Table, paths: list[str]) -> None:
        transaction = table.transaction()
        producer = _Deleting(Operation.DELETE, transaction, table.io)
        for path in paths:
            file = describe_file(self._spell(path), DataFileContent.POSITION_DELETES)
            producer.append_data_file(file)
        producer.commit()
        transaction.commit_transaction()

    def _commit_statistics(self, paths: list[str]) -> None:
        """Let the table's metadata name two of the files: a Puffin file, and statistics of partitions."""
        chosen = self.random.sample(paths, 2)
        puffin, of_partitions = chosen
        for kind, path in (("statistics", puffin), ("partition statistics", of_partitions)):
            self.kept[kind] = {path}
        self.orphans["statistics of nothing"] -= set(chosen)
        table = self.lake.table()
        snapshot_id = table.metadata.current_snapshot_id
        assert snapshot_id is not None
        common = {"snapshot_id": snapshot_id, "file_size_in_bytes": 1}
        with table.update_statistics() as update:
            update.set_statistics(
                StatisticsFile(
                    **common,
                    statistics_path=self._spell(puffin),
                    file_footer_size_in_bytes=1,
                    blob_metadata=[],
                )
            )
        file = PartitionStatisticsFile(**common, statistics_path=self._spell(of_partitions))
        with self.lake.table().transaction() as transaction:
            transaction._apply((SetPartitionStatisticsUpdate(partition_statistics=file),), ())

    def _commit_contents(self) -> None:
        """Commit views, and a content of a type that this package does not know."""
        lake = self.lake
        self._create("odd")
        views = self._files("view", self.folders["t"])
        self._files("content of an unknown type", self.folders["odd"])
        operations = [
            Put(
                ContentKey([lake.namespace, f"view_{number}"]),
                OtherContent(None, "ICEBERG_VIEW", {"metadataLocation": self._spell(path), "versionId": 1}),
            )
            for number, path in enumerate(views)
        ]
        location = {"location": f"file://{self.folders['odd']}/data"}
        operations.append(
            Put(ContentKey([lake.namespace, "delta"]), OtherContent(None, "DELTA_LAKE_TABLE", location))
        )
        lake.nessie.commit(MAIN, expected_hash=self._main_hash(), operations=operations, message="contents")

    def _hide(self, paths: list[str]) -> None:
        """Give the files of the kind `hidden` names as other tools' files have."""
        renamed = {str(path.rename(path.with_name(f"_{path.name}"))) for path in map(Path, paths)}
        self.kept["hidden"] = renamed


def _manifest_paths(table: StaticTable, snapshot_id: int) -> set[str]:
    snapshot = table.snapshot_by_id(snapshot_id)
    assert snapshot is not None
    return {manifest.manifest_path for manifest in snapshot.manifests(table.io)}


def _count(paths_by_kind: Mapping[str, set[str]]) -> dict[str, int]:
    return {kind: len(paths) for kind, paths in paths_by_kind.items() if paths}
