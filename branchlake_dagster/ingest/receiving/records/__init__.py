"""What is received, counted, and kept until it is handed over."""
