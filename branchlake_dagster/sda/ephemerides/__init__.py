"""Interpolate given ephemerides (positions of an object over time), and screen them against the catalog."""
