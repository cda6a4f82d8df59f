"""Ingestion in Dagster: a run for each batch, or one for batch after batch, and what is told of them."""
