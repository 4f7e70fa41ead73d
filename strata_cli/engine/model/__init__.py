"""Model files: GGUF, block layouts, the model's dimensions, its tokenizer and chat template."""
