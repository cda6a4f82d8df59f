"""Undo of publications: a commit on `main` that takes back what they changed and keeps later publications."""
