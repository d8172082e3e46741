"""Mixtures of experts: which tokens go where, on this rank and on others."""
