"""Compaction of tables: Spark rewrites small files and files with deletes, while other writers continue."""
