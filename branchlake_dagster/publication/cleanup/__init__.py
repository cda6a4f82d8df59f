"""The reaper's job and schedule, and the sensor that ends dead writers."""
