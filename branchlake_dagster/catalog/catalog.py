"""`NessieCatalog`: Iceberg tables on one Nessie reference, for PyIceberg."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import LOCATION, WAREHOUSE_LOCATION, Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchIcebergTableError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io import FileIO
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import (
    CommitTableResponse,
    CreateTableTransaction,
    StagedTable,
    Table,
    TableProperties,
)
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import AddSnapshotUpdate, AssertCreate, TableRequirement, TableUpdate
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from branchlake_dagster.catalog import options
from branchlake_dagster.catalog.content_store import (
    NamespaceOperations,
    NoViews,
    ReferenceStore,
    namespace_key,
    require_namespace,
)
from branchlake_dagster.catalog.damaged_files import StoredTable
from branchlake_dagster.catalog.recorded_repositories import record_repository
from branchlake_dagster.catalog.stored_files import read_metadata, record_prefixes
from branchlake_dagster.errors import Unsupported
from branchlake_dagster.internals.pyiceberg import open_creation
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    ContentsAt,
    Delete,
    IcebergTable,
    Namespace,
    Operation,
    Put,
)

if TYPE_CHECKING:
    import pyarrow as pa

GC_ENABLED = "gc.enabled"
NO_SNAPSHOT = -1
_ENDS_PATH = re.compile(r"[?#]")


def table_content(content_id: str | None, location: str, metadata: TableMetadata) -> IcebergTable:
    """Return the content that Nessie stores for a table, with ids as in Iceberg's own NessieCatalog.

    `location` is the path of the metadata file. Without a snapshot, the snapshot id is -1.
    """
    snapshot = metadata.current_snapshot_id
    return IcebergTable(
        content_id=content_id,
        metadata_location=location,
        snapshot_id=NO_SNAPSHOT if snapshot is None else snapshot,
        schema_id=metadata.current_schema_id,
        spec_id=metadata.default_spec_id,
        sort_order_id=metadata.default_sort_order_id,
    )


def _require_table(key: ContentKey, content: Content | None) -> IcebergTable:
    if content is None:
        raise NoSuchTableError(f"Table does not exist: {key}")
    if not isinstance(content, IcebergTable):
        raise NoSuchIcebergTableError(f"Table does not exist: {key} is not a table ({content})")
    return content


_MAX_FOLDER_BYTES = 255
"""The longest name of a folder in most file systems, in bytes."""


def _to_folder_name(name: str, suffix: str = "") -> str:
    """Return a folder name for a level of a table's name, with a suffix that identifies the table.

    `?` and `#` become `_`, because they would end the path of a URL and so truncate the location. A long name
    is cut. Without a suffix, a digest of the name is added to what is left of it.
    """
    folder = _ENDS_PATH.sub("_", name)
    if len(f"{folder}{suffix}".encode()) <= _MAX_FOLDER_BYTES:
        return f"{folder}{suffix}"
    suffix = suffix or f"_{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    left = folder.encode()[: _MAX_FOLDER_BYTES - len(suffix.encode())].decode(errors="ignore")
    return f"{left}{suffix}"


def _format_commit_message(key: ContentKey, updates: Sequence[TableUpdate]) -> str:
    """Format a commit message such as "Update table a.b: append"."""
    snapshots = [update.snapshot.summary for update in updates if isinstance(update, AddSnapshotUpdate)]
    actions = [summary.operation.value for summary in snapshots if summary]
    actions = actions or [update.action for update in updates]
    return f"Update table {key}: {', '.join(dict.fromkeys(actions))}"


def _parent_keys(key: ContentKey) -> tuple[ContentKey, ...]:
    """Return the keys of the namespaces above a key, the outermost first."""
    return tuple(ContentKey(key[:depth]) for depth in range(1, len(key)))


def _is_same_state(table: Table, content: Content | None) -> bool:
    """Check whether `content` is a table with the same metadata file as `table`."""
    return isinstance(content, IcebergTable) and content.metadata_location == table.metadata_location


def _build_response(table: Table) -> CommitTableResponse:
    data = {"metadata": table.metadata, "metadata-location": table.metadata_location}
    return CommitTableResponse.model_validate(data)


class NessieCatalog(NoViews, NamespaceOperations):
    """The Iceberg tables of one Nessie reference, as a PyIceberg catalog.

    Each created table gets a location of its own, because two branches may create the same table. It also
    gets `gc.enabled=false`, because other references may need its files. Tags and hashes are read-only.

    Properties:

    - `uri`: Nessie's API v2
    - `ref`: a branch, tag, `name@hash` or hash (default: `main`)
    - `warehouse`: the folder for new tables
    - `token`, and `ssl.verify` (`true`, `false` or a CA bundle)
    - `commit.author`, and `commit.property.<name>`, which are added to every commit
    - `namespace.create`: with `true`, the commit of a new table also creates the missing namespaces
    - All other properties configure FileIO.

    Args:
        name (str): The name of the catalog in PyIceberg.
        client (Optional[NessieClient]): A client that the caller closes. (default: a new one for `uri`)
        on_load (Optional[Callable[[Identifier], None]]): Called with the identifier of each loaded table.
        **properties (str): The properties above.

    Examples:
        .. code-block:: python

            from branchlake_dagster import NessieCatalog

            lake = NessieCatalog("lake", uri="http://127.0.0.1:19120/api/v2", warehouse="file:///data/lake")
            prices = lake.load_table("shop.prices").scan().to_arrow()
    """

    def __init__(
        self,
        name: str,
        client: NessieClient | None = None,
        on_load: Callable[[Identifier], None] | None = None,
        **properties: str,
    ) -> None:
        # FileIO implementations receive these properties, and must not receive Nessie's token.
        super().__init__(name, **{key: value for key, value in properties.items() if key != options.TOKEN})
        self._owns_client = client is None
        self._on_load = on_load
        self._store = ReferenceStore(
            client or options.build_client(properties),
            properties.get(options.REF) or options.DEFAULT_REF,
            author=properties.get(options.AUTHOR) or options.DEFAULT_AUTHOR,
            properties=options.commit_properties(properties),
        )
        self._creates_namespaces = properties.get(options.NAMESPACE_CREATE) == "true"

    @classmethod
    def from_client(
        cls,
        client: NessieClient,
        ref: str,
        warehouse: str,
        *,
        name: str = "nessie",
        on_load: Callable[[Identifier], None] | None = None,
        **properties: str,
    ) -> NessieCatalog:
        """Create a catalog on `ref` that shares the connections of `client`, and does not close them.

        `on_load` is called with the identifier of each table before `load_table` returns it. `warehouse` is
        the location for tables of namespaces without a location of their own. `properties` are PyIceberg's
        catalog properties.
        """
        all_properties = {**properties, options.REF: ref, WAREHOUSE_LOCATION: warehouse}
        return cls(name, client, on_load, **all_properties)

    @property
    def ref(self) -> str:
        """The reference argument of this catalog: a branch, tag, `name@hash` or hash."""
        return self._store.ref

    @property
    def last_hash(self) -> str | None:
        """The hash of the reference at this catalog's last read or commit.

        None before the first one, and after a failed commit.
        """
        return self._store.last_hash

    def close(self) -> None:
        """Close the connections, unless they belong to a client that the caller passed."""
        if self._owns_client:
            self._store.client.close()

    # -- tables: reading -------------------------------------------------------------------------------

    def _key(self, identifier: str | Identifier) -> ContentKey:
        return ContentKey(Catalog.identifier_to_tuple(identifier))

    def _load(self, key: ContentKey, content: IcebergTable) -> Table:
        location = content.metadata_location
        metadata = read_metadata(self._load_file_io(location=location), location)
        return StoredTable(
            identifier=key.elements,
            metadata=metadata,
            metadata_location=location,
            io=self._load_file_io(metadata.properties, location),
            catalog=self,
        )

    def table_of(self, identifier: Identifier, content: IcebergTable) -> Table:
        """Load the table with the metadata file of `content`, which may differ from the present one.

        A commit through the table is checked against the present state of the reference.
        """
        return self._load(ContentKey(identifier), content)

    def load_table(self, identifier: str | Identifier) -> Table:
        """Load the table from this reference.

        Raises NoSuchTableError, also if the name is a namespace or view. A missing reference raises
        ReferenceNotFound instead.
        """
        key = self._key(identifier)
        # Read in the same request: if the table is missing, the caller usually creates it next.
        parent_keys = _parent_keys(key) if self._creates_namespaces else ()
        content = _require_table(key, self._store.read(key, *parent_keys).contents.get(key))
        if self._on_load is not None:
            self._on_load(key.elements)
        return self._load(key, content)

    def table_exists(self, identifier: str | Identifier) -> bool:
        """Check whether the reference has an Iceberg table with this name. Reads no file.

        False if the name belongs to a namespace or a view. Raises ReferenceNotFound if the reference is
        missing.
        """
        key = self._key(identifier)
        return isinstance(self._store.read(key).contents.get(key), IcebergTable)

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        """List the identifiers of the tables directly in `namespace`. Raises NoSuchNamespaceError."""
        key = namespace_key(namespace)
        require_namespace(self._store.read(key), key)
        return [entry.key.elements for entry in self._store.iter_children(key.elements, "ICEBERG_TABLE")]

    # -- tables: creating ------------------------------------------------------------------------------

    def _new_location(self, key: ContentKey, state: ContentsAt, table_uuid: uuid.UUID) -> str:
        """Return the location of a new table, as Iceberg's Java catalog does.

        Its form is `<location of the namespace, or warehouse/levels>/<table>_<uuid>`, with long names cut.
        """
        namespace = state.contents.get(ContentKey(key.parent))
        base = namespace.properties.get(LOCATION) if isinstance(namespace, Namespace) else None
        if not base:
            warehouse = self.properties.get(WAREHOUSE_LOCATION)
            if not warehouse:
                raise ValueError("No default path is set, please specify a location when creating a table")
            base = "/".join([warehouse.rstrip("/"), *map(_to_folder_name, key.parent)])
        return f"{base.rstrip('/')}/{_to_folder_name(key[-1], f'_{table_uuid}')}"

    def _create_staged_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> StagedTable:
        """Plan a new table in memory, for `create_table` and `create_table_transaction`.

        Nothing is committed, and no metadata file is written. Only the folders that the table's files will
        have are recorded in the warehouse (see `record_prefixes`). The arguments are those of `create_table`.
        """
        key = self._key(identifier)
        namespace_key(key.parent)
        values: dict[str, Any] = {GC_ENABLED: "false", **properties}
        version = int(values.get(TableProperties.FORMAT_VERSION, TableProperties.DEFAULT_FORMAT_VERSION))
        iceberg_schema = self._convert_schema_if_needed(schema, version)  # type: ignore[arg-type]
        state = self._cached_if_creatable(key) or self._store.read(key, *_parent_keys(key))
        self._store.require_branch(state.reference)
        if key in state.contents:
            raise TableAlreadyExistsError(f"Table {key} already exists")
        self._plan_namespaces(key, state)
        table_uuid = uuid.uuid4()
        table_location = location.rstrip("/") if location else self._new_location(key, state, table_uuid)
        metadata_location = load_location_provider(table_location, values).new_table_metadata_file_location()
        metadata = new_table_metadata(
            iceberg_schema, partition_spec, sort_order, table_location, values, table_uuid=table_uuid
        )
        io = self._load_file_io(metadata.properties, metadata_location)
        self.record_prefixes(metadata)
        return StagedTable(key.elements, metadata, metadata_location, io, self)

    def create_table_transaction(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> CreateTableTransaction:
        """Return a transaction that creates a table and writes to it, all in one commit.

        The arguments are those of `create_table`. Raises TableAlreadyExistsError or NoSuchNamespaceError,
        here or when the transaction is committed.
        """
        staged = self._create_staged_table(
            identifier, schema, location, partition_spec, sort_order, properties
        )
        return open_creation(staged, StoredTable)

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create an empty table in one commit, and return it.

        Without `location`, the table's folder is `<table>_<uuid>` in the namespace's folder. `partition_spec`
        and `sort_order` refer to the field ids of `schema`; the table's columns get fresh ids. `properties`
        are the table's properties. Raises TableAlreadyExistsError if the name is in use, or
        NoSuchNamespaceError.
        """
        staged = self._create_staged_table(
            identifier, schema, location, partition_spec, sort_order, properties
        )
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        self._put_table(staged.name(), staged.metadata_location, staged.metadata, "Create table")
        return self._to_table(staged)

    def _to_table(self, staged: StagedTable) -> Table:
        return StoredTable(staged.name(), staged.metadata, staged.metadata_location, staged.io, self)

    def _put_table(
        self,
        identifier: Identifier,
        location: str,
        metadata: TableMetadata,
        verb: str,
        *,
        overwrite: bool = False,
    ) -> None:
        """Commit the metadata file at `location` under `identifier`.

        `verb` begins the commit's message. Raises TableAlreadyExistsError if the key has a content, unless it
        is a table and `overwrite` is true.
        """
        key = ContentKey(identifier)
        namespace_key(key.parent)

        def plan(state: ContentsAt) -> Sequence[Operation]:
            current = state.contents.get(key)
            if current is not None and not (overwrite and isinstance(current, IcebergTable)):
                raise TableAlreadyExistsError(f"Table {key} already exists")
            content = table_content(current.content_id if current else None, location, metadata)
            return [*self._plan_namespaces(key, state), Put(key, content)]

        self._store.commit_plan(
            [key, *_parent_keys(key)], plan, f"{verb} {key}", cached_state=self._cached_if_creatable(key)
        )

    def _cached_if_creatable(self, key: ContentKey) -> ContentsAt | None:
        """Return the cached contents if a new table can be created according to them, else None.

        The cache can never prove that a table cannot be created.
        """
        state = self._store.get_cached(key, *_parent_keys(key))
        if state is None or key in state.contents:
            return None
        parents = [state.contents.get(parent) for parent in _parent_keys(key)]
        is_creatable = all(
            isinstance(parent, Namespace) or (parent is None and self._creates_namespaces)
            for parent in parents
        )
        return state if is_creatable else None

    def _plan_namespaces(self, key: ContentKey, state: ContentsAt) -> list[Operation]:
        """Return the operations that create the missing namespaces of a new table.

        Raises NoSuchNamespaceError if a namespace is missing and must not be created.
        """
        parent_keys = _parent_keys(key)
        missing = [key for key in parent_keys if self._creates_namespaces and key not in state.contents]
        for parent_key in (
            set(parent_keys[-1:]).union(parent_keys if self._creates_namespaces else ()).difference(missing)
        ):
            require_namespace(state, parent_key)
        return [Put(key, Namespace(None, key.elements)) for key in missing]

    def register_table(
        self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False
    ) -> Table:
        """Commit an existing metadata file as a table with this name, and load the table.

        With `overwrite`, it may replace a table. Otherwise raises TableAlreadyExistsError.
        """
        key = self._key(identifier)
        metadata = read_metadata(self._load_file_io(location=metadata_location), metadata_location)
        self.record_repository()
        self._put_table(key.elements, metadata_location, metadata, "Register table", overwrite=overwrite)
        return self.load_table(key.elements)

    # -- tables: changing ------------------------------------------------------------------------------

    def record_prefixes(self, metadata: TableMetadata) -> None:
        """Record in the warehouse where files of a table are written (see `stored_files.list_prefixes`).

        Code that writes files of a table which this catalog has only loaded must call this before it writes.
        The Nessie repository is recorded as well (see `record_repository`). Raises OSError and NessieError.
        """
        self.record_repository()
        warehouse = self.properties.get(WAREHOUSE_LOCATION)
        if warehouse:
            record_prefixes(self._warehouse_io, warehouse, metadata)

    def record_repository(self) -> None:
        """Record in the warehouse that this Nessie repository has tables there.

        Then a collection of another Nessie repository deletes no files of that warehouse. Costs a request to
        Nessie and one to the storage, once per process and warehouse. Raises OSError and NessieError.
        """
        warehouse = self.properties.get(WAREHOUSE_LOCATION)
        if warehouse:
            record_repository(self._warehouse_io, warehouse, self._store.client)

    @cached_property
    def _warehouse_io(self) -> FileIO:
        return self._load_file_io(location=self.properties[WAREHOUSE_LOCATION])

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Write the next metadata file and commit it, if the requirements hold for the table's present state.

        Raises CommitFailedException if a requirement does not hold or the table changes during the call
        (nothing was committed), CommitStateUnknownException if the outcome is unknown (the files stay),
        TableAlreadyExistsError and NoSuchTableError.
        """
        key = ContentKey(table.name())
        self._store.require_branch()
        creates = any(isinstance(requirement, AssertCreate) for requirement in requirements)
        # A commit without requirements skips the cache: it applies to the current state.
        cached_state = self._store.get_cached(key) if requirements else None
        cached_error: Exception | None = None
        if creates and self._cached_if_creatable(key) is not None:
            return self._create_from_updates(key, requirements, updates)
        if cached_state is not None and not creates and _is_same_state(table, cached_state.contents.get(key)):
            try:  # usually nothing changed since the load; otherwise Nessie refuses the commit
                return self._commit_updates(cached_state, table, requirements, updates)
            except (CommitFailedException, ReferenceNotFound) as error:
                cached_error = error
        state = self._store.read(key)
        content = state.contents.get(key)
        if content is None and creates:
            return self._create_from_updates(key, requirements, updates)
        if content is None and cached_error is not None:
            raise CommitFailedException(
                f"Table has been dropped by another process: {key}."
            ) from cached_error
        return self._commit_updates(
            state, self._load(key, _require_table(key, content)), requirements, updates
        )

    def _create_from_updates(
        self, key: ContentKey, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        staged = self._update_and_stage_table(None, key.elements, requirements, updates)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        self._put_table(key.elements, staged.metadata_location, staged.metadata, "Create table")
        return _build_response(staged)

    def _commit_updates(
        self,
        state: ContentsAt,
        current: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Commit the next state of a table. `current` is the table as its content in `state` describes it.

        If the updates change nothing, nothing is committed.
        """
        key = ContentKey(current.name())
        current_content = _require_table(key, state.contents.get(key))
        staged = self._update_and_stage_table(current, key.elements, requirements, updates)
        if staged.metadata == current.metadata:
            return _build_response(current)
        self.record_prefixes(staged.metadata)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        content = table_content(current_content.content_id, staged.metadata_location, staged.metadata)
        try:
            self._store.commit(state.reference, [Put(key, content)], _format_commit_message(key, updates))
        except NessieConflict as conflict:
            raise CommitFailedException(
                f"Table has been updated by another process: {key}. {conflict}"
            ) from conflict
        return _build_response(staged)

    @staticmethod
    def _delete_old_metadata(io: FileIO, base: TableMetadata, metadata: TableMetadata) -> None:
        """Do nothing. PyIceberg calls this after a commit to delete old metadata files.

        Another branch, a tag or an older hash may still read them.
        """

    def drop_table(self, identifier: str | Identifier) -> None:
        """Remove the table from this branch in one commit. No file is deleted.

        Raises NoSuchTableError, also if the name is a namespace or view.
        """
        key = self._key(identifier)

        def plan(state: ContentsAt) -> Sequence[Operation]:
            _require_table(key, state.contents.get(key))
            return [Delete(key)]

        self._store.commit_plan([key], plan, f"Drop table {key}")

    def purge_table(self, identifier: str | Identifier) -> None:
        """Raise Unsupported.

        Only a collector that reads every reference can decide which files are unused.
        """
        key = self._key(identifier)
        raise Unsupported(
            f"Purging {key} would delete files that other branches, tags and hashes may still need.",
            table=key.name,
            branch=self.ref,
            hint="Use drop_table and leave the files to the collector.",
        )

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Rename a table in one commit, and load it. Its content id and files stay the same.

        The namespace of the new name must exist. Raises NoSuchTableError, NoSuchNamespaceError or
        TableAlreadyExistsError.
        """
        source, target = self._key(from_identifier), self._key(to_identifier)
        namespace = namespace_key(target.parent)

        def plan(state: ContentsAt) -> Sequence[Operation]:
            content = _require_table(source, state.contents.get(source))
            require_namespace(state, namespace)
            if target in state.contents:
                raise TableAlreadyExistsError(f"Table {target} already exists")
            return [Delete(source), Put(target, content)]

        self._store.commit_plan([source, target, namespace], plan, f"Rename table {source} to {target}")
        return self.load_table(target.elements)
