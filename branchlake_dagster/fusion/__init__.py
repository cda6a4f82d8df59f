"""The Space Domain Awareness starter graph: catalogue, observations, fused tracks, conjunctions."""
