"""Alerts of expected close approaches, and their corrections."""
