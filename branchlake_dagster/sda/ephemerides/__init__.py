"""Ephemerides that somebody else computed: interpolated, and screened against the catalogue."""
