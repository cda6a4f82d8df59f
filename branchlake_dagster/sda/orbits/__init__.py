"""Orbital mechanics on arrays: time, frames, SGP4 propagation and two-body motion."""
