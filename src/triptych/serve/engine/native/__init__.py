"""Kernels for CPUs in C++: products with packed weights, attention over block tables."""
