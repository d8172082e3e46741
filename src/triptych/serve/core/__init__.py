"""What a serving engine decides, without devices, clocks or processes: see docs/scheduling.md."""
