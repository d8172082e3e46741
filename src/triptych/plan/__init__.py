"""The decision: a plan as a value, its legality, its layout of every tensor, its text forms."""
