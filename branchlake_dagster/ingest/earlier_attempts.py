"""A step that is attempted again begins as the first attempt did: what that one committed is taken back.

An attempt may have committed its batch although it failed: it broke before anybody was told, or its process
died. To go on after it would leave its dead letters and broken contracts unjudged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from branchlake_dagster.ingest.batch_commit import list_staging_tables
from branchlake_dagster.ingest.batch_tables import Identifier
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, Operation, Put


def undo_earlier_attempt(
    client: NessieClient,
    branch: str,
    base_hash: str,
    tables: Iterable[Identifier],
    *,
    ingestion: str,
    properties: Mapping[str, str],
) -> bool:
    """Put an ingestion's tables back on a run's branch as they were at its base; whether they were changed.

    Tables in which rows waited to be merged go.

    A commit of the earlier attempt that is still on its way is refused by Nessie afterwards, because these
    tables have changed. Nessie's errors pass through.
    """
    if client.reference(branch).hash == base_hash:
        return False
    identifiers = list(tables)
    keys = [ContentKey(one) for one in (*identifiers, *list_staging_tables(client, branch, identifiers))]
    current_contents = client.contents_at(branch, keys)
    base_contents = client.contents(f"{MAIN}@{base_hash}", keys)
    operations: list[Operation] = []
    for key in keys:
        base_content = base_contents.get(key)
        if base_content != current_contents.contents.get(key):
            operations.append(Put(key, base_content) if base_content is not None else Delete(key))
    if operations:
        client.commit(
            branch,
            expected_hash=current_contents.reference.hash,
            operations=operations,
            message=f"Ingest {ingestion}: an earlier attempt of the step is taken back",
            properties=properties,
        )
    return bool(operations)
