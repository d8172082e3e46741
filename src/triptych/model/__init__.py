"""What runs: layers, shapes, parameters and FLOPs of a language model."""
