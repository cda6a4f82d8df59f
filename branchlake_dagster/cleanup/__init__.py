"""Clean-up: run branches that nobody will publish, and files that discarded branches left behind."""
