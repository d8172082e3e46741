"""Where it runs: devices, links, nodes."""
