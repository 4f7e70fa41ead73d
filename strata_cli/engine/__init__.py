"""The engine: everything between a prompt's token ids and its logits."""
