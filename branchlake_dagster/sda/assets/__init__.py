"""The graph's assets, one module per group."""
