"""General perturbations (GP) element sets: reading TLE and OMM files and simulating a catalogue."""
