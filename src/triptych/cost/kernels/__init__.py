"""Seconds of kernels: products, attention, collectives, by what a device and its links attain."""
