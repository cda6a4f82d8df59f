"""One batch: its pass over the records on Spark, and its one commit on a branch."""
