"""Ingestion beside plain Spark Structured Streaming."""
