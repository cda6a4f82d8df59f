"""The history of a table, from Iceberg metadata: snapshots, changed files, net changes and ranges of values.

This package does not use Spark.
"""
