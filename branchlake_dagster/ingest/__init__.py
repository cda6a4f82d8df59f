"""Exactly-once ingestion: topics into tables, offsets and rows in one commit (ADR 33)."""
