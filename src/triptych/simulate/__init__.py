"""Serving without devices: arrivals, steps of predicted duration, and what users would see."""
