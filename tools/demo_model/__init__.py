"""Recipe of the embedded demo model: data, training, export and evaluation (see README.md)."""
