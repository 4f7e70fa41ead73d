"""The model's layers as launches, its weights on the device, and a sequence's state."""
