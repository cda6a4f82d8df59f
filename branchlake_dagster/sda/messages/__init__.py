"""Messages of the CCSDS for conjunctions and ephemerides: written, and read as hostile input."""
