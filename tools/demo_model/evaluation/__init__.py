"""Measures the shipped demo model through the engine: decisions, held-out text, expert load."""
