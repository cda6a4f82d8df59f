"""Waiting for the valid-through time of ingested tables: an automation condition and an asset check."""
