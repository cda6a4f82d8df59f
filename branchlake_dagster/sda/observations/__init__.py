"""Convert raw measurements to observations with a common set of columns, the envelope."""
