"""A plan as another engine's configuration, and another engine's configuration as a plan."""
