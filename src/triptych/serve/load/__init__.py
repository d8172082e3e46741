"""Load on a server: requests of a trace sent at their times, and what came back when."""
