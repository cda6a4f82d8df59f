"""Uses of names that libraries do not export: one module per library, each use with its reason.

No other part of the package names a private module or attribute of a library. Some modules replace names of a
library for the whole process. `docs/upstream.md` reports those that are defects of the library.

- `column_metrics`, at import: PyIceberg's metrics evaluators, file statistics and `write_file`, because its
  bounds hide rows
- `field_paths`, at import: `_ConvertToArrowExpression._get_field_name` of PyIceberg, because it takes a dot
  in a column's name for a field of a struct
- `null_lists`, at import: `ArrowProjectionVisitor.list` and `.map` of PyIceberg, because they take null lists
  of structs for empty ones
- `null_structs`, at import: `ArrowProjectionVisitor.struct` of PyIceberg, because it cannot write a null
  struct with required fields
- `pyiceberg`, at import: `ExecutorFactory` in PyIceberg's `snapshot_producers`, because a failed commit
  leaves writers running
- `pyiceberg`, at import: `manifest_evaluator` in PyIceberg's `snapshot_producers`, because threads share its
  state
- `pyiceberg`, at import: `LazyDict._build_dict`, because other threads see a map before it is filled
- `dagster`, at import: `enter_execution_context` in Dagster's `execute_step`, to find the step of a thread
  that an asset has started
- `dagster_launching`, in warm run processes: `create_engine` in Dagster's SQLite storages, to create one
  engine per database instead of one per call
- `dagster_launching`, in warm run processes: `ScriptDirectory.from_config` of Alembic, to read the revisions
  once
- `pyspark`, when a session starts: `SparkSession.__del__` of Spark Connect, because it may wait for itself
  forever
- `pyspark`, when a session starts: a filter on the logger of Spark Connect, because Dagster switches the
  logger on
"""
