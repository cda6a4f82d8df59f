"""A two-stage pipeline over playback events, by a look-back of 14 days and by changes, side by side."""
