"""Tags that keep a commit readable for a limited time: for a reader, or while a table is restored.

Every tag keeps the files of its commit, whatever the tag's name. The name of a temporary tag is
`{prefix}{end}-{UUID}`, with its end in UTC, because Nessie stores nothing else about a tag. A killed process
leaves its tag behind. A collection of files deletes tags whose end has passed by the earliest of
several clocks. Readers delete only their own tags, because the clock of their machine may be wrong.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieError, ReferenceNotFound
from branchlake_dagster.runs.branch_owner import UUID_PATTERN
from branchlake_dagster.stored_names import ReferencePrefix

_logger = logging.getLogger(__name__)
_CLOCK_TOLERANCE = timedelta(minutes=10)
"""How far the clock of the process that deletes a tag may be ahead of the clock that its end is from."""
_END_FORMAT = "%Y%m%dT%H%M%SZ"
_NAME_PATTERN = (
    f"^({ReferencePrefix.UNDROP}|{ReferencePrefix.READING})([0-9]{{8}}T[0-9]{{6}}Z)-{UUID_PATTERN}$"
)


def current_time() -> datetime:
    """Return the time of this machine, in UTC."""
    return datetime.now(UTC)


@contextmanager
def keep_commit(
    client: NessieClient,
    prefix: str,
    commit_hash: str,
    *,
    from_ref: str,
    lifetime: timedelta,
    now: Callable[[], datetime] = current_time,
) -> Iterator[str]:
    """Keep all files of a commit while the body runs, at most for `lifetime`. Yields the name of the tag.

    `prefix` is `ReferencePrefix.UNDROP` or `READING`, and `from_ref` a reference that leads to the commit.
    Raises ReferenceNotFound if it does not. If the tag cannot be deleted afterwards, this is logged and is no
    error, because the tag ends by itself.
    """
    name = f"{prefix}{now() + lifetime:{_END_FORMAT}}-{uuid.uuid4()}"
    tag = client.create_tag(name, from_ref=from_ref, from_hash=commit_hash)
    try:
        yield name
    finally:
        try:
            client.delete_tag(name, expected_hash=tag.hash)
        except ReferenceNotFound:
            pass
        except NessieError as error:
            _logger.warning("The tag %s was not deleted. It stays until its end. %s", name, error)


def remove_ended_tags(client: NessieClient, now: datetime) -> list[str]:
    """Delete the temporary tags whose end has passed, and return their names."""
    removed = []
    for tag in client.references(filter=f"refType == 'TAG' && ref.name.matches('{_NAME_PATTERN}')"):
        end = find_tag_end(tag.name)
        if end is None or now <= end + _CLOCK_TOLERANCE:
            continue
        with suppress(NessieConflict, ReferenceNotFound):
            client.delete_tag(tag.name, expected_hash=tag.hash)
            removed.append(tag.name)
    return removed


def find_tag_end(name: str) -> datetime | None:
    """Return the end of a temporary tag; None if the name is not that of a temporary tag."""
    match = re.fullmatch(_NAME_PATTERN, name)
    if match is None:
        return None
    try:
        return datetime.strptime(match[2], _END_FORMAT).replace(tzinfo=UTC)
    except ValueError:  # eight digits that are no date
        return None
