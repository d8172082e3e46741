"""Attention over parts: documents of one row, tiles of a window, sequences split over ranks."""
