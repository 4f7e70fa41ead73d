"""Typed decisions: questions with fixed answers about a state, each answer with a probability."""
