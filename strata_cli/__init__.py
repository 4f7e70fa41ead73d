"""Strata: mixture-of-experts language models whose experts do not fit in VRAM."""
