"""The undo of an earlier attempt of a step, so that a retry starts from the base of the run's branch.

An attempt may have committed its batch although it failed: it failed before it reported the batch, or its
process died. A retry on top of that commit would report no check results for its dead letters and broken
contracts.
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
    """Reset an ingestion's tables on a run's branch to the branch's base. Return whether they had changed.

    Staging tables of earlier attempts are dropped. If a commit of the earlier attempt arrives later, Nessie
    refuses it, because this reset has changed the same tables. Nessie's errors pass through.
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
