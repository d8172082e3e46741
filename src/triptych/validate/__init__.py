"""Predicted beside measured, for a table of runs."""
