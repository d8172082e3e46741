"""What was predicted and what was measured, for people: terminal tables and HTML; no torch."""
