"""Compaction of tables: small files and delete files are rewritten on Spark, and published beside writers."""
