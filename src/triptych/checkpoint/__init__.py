"""Checkpoints in one logical form: saved under any plan, loaded under any other."""
