"""What runs tell when they are looked at: summaries of traces, and arms that are compared."""
