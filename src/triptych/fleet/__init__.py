"""Several models on one cluster: groups of devices, which models on which, judged by simulation."""
