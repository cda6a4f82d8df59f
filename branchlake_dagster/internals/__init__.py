"""What branchlake uses of libraries beyond what they export: one module per library, each use with its reason.

No other part of the package names a private module or attribute of a library. These replacements hold for a
whole process; `docs/upstream.md` has the reports for the libraries' authors:

| what is replaced | where | when | why |
|---|---|---|---|
| PyIceberg's metrics evaluators, file statistics, `write_file` | `column_metrics` | at import | its bounds
hide rows |
| `ExecutorFactory` in PyIceberg's `snapshot_producers` | `pyiceberg` | at import | a failed commit leaves
writers running |
| `create_engine` in Dagster's SQLite storages | `dagster_sqlite` | in warm run processes | an engine per
database, not per call |
| `SparkSession.__del__` of Spark Connect | `pyspark` | when a session starts | it may wait for itself for
ever |
| a filter on the logger of Spark Connect | `pyspark` | when a session starts | Dagster switches the logger on
|
"""
