"""The planner: which legal plan is fastest, and why."""
