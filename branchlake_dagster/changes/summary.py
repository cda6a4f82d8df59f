"""The names of our entries in a snapshot's summary that say how it came to be."""

PREFIX = "branchlake."
WRITE_MODE = f"{PREFIX}write_mode"
RUN_ID = f"{PREFIX}run_id"
REPLAYED_FROM = f"{PREFIX}replayed_from"
"""In a replayed snapshot's summary: the id of the snapshot on the run's branch."""
CHANGE_OF = f"{PREFIX}change_of"
"""On a change table's snapshot: the table whose files it only refers to."""
