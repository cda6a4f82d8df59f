"""Replaying a run's snapshots on what `main` has become, or the reason why not."""
