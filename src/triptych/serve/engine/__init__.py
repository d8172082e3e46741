"""Running a model for others: text in, text out, under a plan."""
