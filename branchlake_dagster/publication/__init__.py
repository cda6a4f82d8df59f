"""The quality gate, the publisher that merges a passing run into `main`, and their sensor."""
