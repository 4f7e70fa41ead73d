"""The model that ships inside the package.

`demo.gguf` is a small `qwen4exp` mixture-of-experts trained from random weights;
`docs/model-card.md` says what it can do and `tools/demo_model/` how it is made.
"""

from pathlib import Path

DEMO_MODEL_PATH = Path(__file__).with_name("demo.gguf")
