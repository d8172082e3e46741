"""Seconds, bytes and tokens of serving: one step, memory for keys and values, the steady state."""
