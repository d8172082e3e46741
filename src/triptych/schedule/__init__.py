"""Pipeline schedules as programs: generated, checked, simulated and drawn; no torch."""
