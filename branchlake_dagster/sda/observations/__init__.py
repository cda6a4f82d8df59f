"""Observations: raw measurements in one envelope."""
