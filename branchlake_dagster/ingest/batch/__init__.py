"""One batch: what is known before it, its passes over the records, and its one commit on a branch."""
