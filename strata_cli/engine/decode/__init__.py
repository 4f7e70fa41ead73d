"""One token at a time: forward, sample, stop."""
