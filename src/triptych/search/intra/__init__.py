"""Inside a stage: which axis of the mesh divides which dimension of every operator."""
