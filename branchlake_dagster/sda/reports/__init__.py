"""What operators look at: pictures of what was computed."""
