"""What happened to a table, from Iceberg metadata: snapshots, files, net changes and row ranges. No Spark."""
