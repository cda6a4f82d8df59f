"""Live sensors, simulated: the very bytes that three kinds of source send, at any rate, by seed."""
