"""How strata.pyz, the whole program in one file, is put together."""
