"""Tensor and sequence parallelism: region entries and exits, embedding, loss."""
