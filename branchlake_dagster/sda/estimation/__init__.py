"""Batch estimation of object states from native measurements."""
