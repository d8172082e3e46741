"""The two sides of every pair that the benchmarks compare: ours, and a real peer."""
