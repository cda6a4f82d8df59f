"""Orbital mechanics on arrays: time, frames, SGP4 propagation and the two-body mapping."""
