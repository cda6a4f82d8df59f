"""Expiry of snapshots and rewriting of manifests, each by one commit per table on `main`."""
