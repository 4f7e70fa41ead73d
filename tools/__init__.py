"""Tools that build what the package ships; nothing here is installed with it."""
