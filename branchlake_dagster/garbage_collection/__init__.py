"""Finds and deletes files that no reference of Nessie can read any more. In any doubt a file is kept."""
