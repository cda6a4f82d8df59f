"""Ending run branches that nobody will publish."""
