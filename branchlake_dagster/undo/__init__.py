"""Undo of publications: a commit on `main` that reverses what they changed and keeps later publications."""
