"""Find and delete files that no reference of Nessie can read any more. In case of doubt, a file is kept."""
