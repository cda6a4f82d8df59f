"""Sensor network, measurement models and the simulation of native measurements."""
