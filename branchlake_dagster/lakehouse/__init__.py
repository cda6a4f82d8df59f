"""The lake: embedded servers, Nessie client, PyIceberg catalogue, Spark sessions and their errors."""
