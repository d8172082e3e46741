"""Training runs: job file, text, loop, launch and what happens when a rank dies."""
