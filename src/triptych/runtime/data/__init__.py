"""Data parallelism: flat buckets, sharded optimizer state."""
