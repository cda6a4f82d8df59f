"""Exactly-once ingestion: each batch commits the rows of all tables together with the offsets (ADR 33)."""
