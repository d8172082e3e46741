"""Other planners, as `peers_planning.py` asks them: what they can express, and their answers."""
