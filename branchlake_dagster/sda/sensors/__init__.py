"""The simulated sensor network, the measurement models, and the simulation of measurements."""
