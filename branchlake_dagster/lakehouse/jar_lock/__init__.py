"""The lock file of the embedded servers' jars, and the comparison of jars with it."""
