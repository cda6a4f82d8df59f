"""Expiry of snapshots: which snapshots of a table stay, the commit that removes the others; manifests."""
