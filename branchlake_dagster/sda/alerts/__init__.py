"""Derive alerts of expected close approaches, and their corrections."""
