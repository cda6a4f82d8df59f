"""The registry of objects: many catalogues merged to one, its history, and what became of each object."""
