"""Context parallelism: the sequence is split over ranks, only attention communicates."""
