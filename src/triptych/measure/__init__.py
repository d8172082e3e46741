"""Calibration: what the machine or cluster at hand attains, as a cluster file."""
