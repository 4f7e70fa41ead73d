"""Kernels: one family per file, each with its wrapper, host body and numpy reference."""
