"""Pipeline parallelism: one interpreter for every schedule program."""
