"""Running a plan on `torch.distributed`: mesh, collectives and the three parallelisms."""
