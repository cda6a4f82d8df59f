"""Contracts as constraints: what pandera declares, compiled to Spark conditions."""
