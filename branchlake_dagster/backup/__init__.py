"""Back up and restore the embedded lake: Nessie's store, the warehouse and Dagster's home."""
