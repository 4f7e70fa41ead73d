"""Prompt tokens in, state filled, logits out."""
