"""Find close approaches of all pairs of objects in the catalog, and assess their risk."""
