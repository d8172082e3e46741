"""Decoder layers of the plain kind, written out: forward and backward, a node of autograd each."""
