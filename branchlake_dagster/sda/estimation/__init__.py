"""Estimate positions and velocities of objects from measurements of several sensors."""
