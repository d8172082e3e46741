"""What a plan costs: seconds, bytes in memory and on the wire of a training step; no torch."""
