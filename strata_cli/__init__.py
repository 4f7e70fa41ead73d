"""Strata: mixture-of-experts language models whose experts do not fit in VRAM."""

__version__ = "0.1.0"
