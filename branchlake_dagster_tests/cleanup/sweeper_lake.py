"""A lake with discarded branches for the tests of the sweeper: real Iceberg files."""

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table
from pyiceberg.types import StringType

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, OwnerState
from branchlake_dagster.cleanup.sweeper import Sweeper, Sweeping
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ReferenceType
from branchlake_dagster.runs.discarding import discard_branch, discarded_tag_name
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.table_files import TableFiles

HOUR = timedelta(hours=1)
ROWS = pa.table({"n": [1, 2, 3]})
NAMES_RUN = f"{COMMIT_PROPERTY}{LakeProperty.RUN_ID}"


class Lake:
    """A namespace on `main` with one published table, and run branches beside it."""

    def __init__(self, lake: Lakehouse, namespace: str) -> None:
        self.lake, self.nessie, self.namespace = lake, lake.nessie, namespace
        catalog = lake.catalog()
        catalog.create_namespace(namespace)
        catalog.create_table((namespace, "t"), ROWS.schema)
        catalog.load_table((namespace, "t")).append(ROWS)
        self.root = Path(lake.settings.warehouse_uri.removeprefix("file://")) / namespace
        self.owners: dict[str, BranchOwner] = {}

    def named(self, name: str) -> str:
        """The branch of a run: its UUID ends in the namespace's."""
        return f"run-{crc32(name.encode()):08x}-0000-4000-8000-{self.namespace[1:]}"

    def branch(self, name: str) -> str:
        branch = self.named(name)
        head = self.nessie.reference(MAIN).hash
        self.nessie.create_branch(branch, from_ref=MAIN, from_hash=head)
        return branch

    def record(self, branch: str, base: str) -> None:
        """Let Dagster know the run of a branch, and its base."""
        self.owners[branch] = BranchOwner(run_id_of_branch(branch), OwnerState.UNPUBLISHED, base_hash=base)

    def catalog(self, ref: str) -> Catalog:
        """Whose commits name the run, on the branch of one."""
        own = ref.startswith("run-")
        return self.lake.catalog(ref, properties={NAMES_RUN: run_id_of_branch(ref)} if own else {})

    def table(self, ref: str = MAIN, name: str = "t") -> Table:
        return self.catalog(ref).load_table((self.namespace, name))

    def rows(self, ref: str = MAIN, name: str = "t") -> list[int]:
        return sorted(self.table(ref, name).scan().to_arrow()["n"].to_pylist())

    def create(self, ref: str, name: str) -> Table:
        return self.catalog(ref).create_table((self.namespace, name), ROWS.schema)

    def discard(self, branch: str) -> str:
        discard_branch(self.nessie, self.nessie.reference(branch, fetch_metadata=True))
        return discarded_tag_name(branch)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def names(self) -> set[str]:
        found = self.nessie.references(filter=f"ref.name.contains('{self.namespace[1:]}')")
        return {ref.name for ref in found}

    def sweep(
        self, *, later: timedelta = 2 * HOUR, dry_run: bool = False, anyones: bool = True
    ) -> list[Sweeping]:
        def owners(branches: Collection[str]) -> Mapping[str, BranchOwner]:
            return {branch: self.owners[branch] for branch in branches if branch in self.owners}

        sweeper = Sweeper(
            self.nessie,
            TableFiles({}),
            owners,
            grace=HOUR,
            now=lambda: datetime.now(UTC) + later,
            anyones=anyones,
            instance="here",
            ref_filter=f"refType == 'TAG' && ref.name.contains('-{self.namespace[1:]}')",
        )
        return list(sweeper.run(dry_run=dry_run))


@pytest.fixture
def lake(lakehouse: Lakehouse, namespace: str) -> Iterator[Lake]:
    made = Lake(lakehouse, namespace)
    yield made
    for ref in list(made.nessie.references(filter=f"ref.name.contains('{namespace[1:]}')")):
        delete = made.nessie.delete_tag if ref.type is ReferenceType.TAG else made.nessie.delete_branch
        delete(ref.name, expected_hash=ref.hash)


def work(lake: Lake, branch: str) -> None:
    """What a run may do: append, replace, change the schema, create a table, create and drop another one."""
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.table(branch).overwrite(pa.table({"n": [20]}))
    with lake.table(branch).update_schema() as update:
        update.add_column("more", StringType())
    lake.create(branch, "made").append(ROWS)
    lake.create(branch, "dropped").append(ROWS)
    lake.catalog(branch).drop_table((lake.namespace, "dropped"))


def drop(lake: Lake, ref: str, name: str = "t") -> None:
    lake.catalog(ref).drop_table((lake.namespace, name))
