"""Estimate the errors of element sets by age, their jumps, and from these the probability of collision."""
