"""What happened to a table, read from Iceberg metadata: snapshots, files, net changes and row ranges. No Spark."""
