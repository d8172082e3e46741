"""Between stages: which layers run on which submesh, with which degrees."""
