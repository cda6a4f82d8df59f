"""Clean up run branches that will not be published, and the files of discarded branches."""
