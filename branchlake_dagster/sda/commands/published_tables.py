"""Load tables of the pipeline that a lake may not have yet, for the commands that list their rows."""

from __future__ import annotations

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.query.reference import LakeState


def load_published_table(reader: LakeReader, name: str, state: LakeState) -> Table | None:
    """Load the table `name` at a state of the lake. None if the table does not exist in that state.

    A table of the pipeline exists from its first publication on.
    """
    try:
        return reader.table(name, branch=state.ref)
    except NoSuchTableError:
        return None
