"""Maintenance of tables: their health, and the Dagster definitions of all maintenance."""
