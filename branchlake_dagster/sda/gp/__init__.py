"""Read general perturbations (GP) element sets from TLE and OMM files, and simulate catalogs."""
