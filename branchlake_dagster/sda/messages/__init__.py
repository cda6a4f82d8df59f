"""Write CCSDS messages about conjunctions and ephemerides, and read ephemerides from untrusted files."""
