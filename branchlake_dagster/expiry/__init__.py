"""Expiry of snapshots: which snapshots of a table stay, and the commit on `main` that removes the others."""
