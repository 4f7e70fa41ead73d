"""The demo model in transformers, on the exact weights that a GGUF file stores.

This is the independent reference of the engine: float32, eager, on the CPU. Needs torch and
transformers >= 5.24, which nothing else of the project does.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tools.demo_model.checkpoint import Arrays, read_checkpoint
from tools.demo_model.layout import restore, rules
from tools.demo_model.quantize import dequantize


def stored_weights(source: Path, gguf: Path) -> Arrays:
    """Return the checkpoint of `source` with every value replaced by what `gguf` stores."""
    from tools.demo_model.architecture import read_config

    checkpoint = read_checkpoint(source)
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for rule in rules(read_config(source / "config.json")):
        tensor = stored[rule.name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)
        restore(rule, values, checkpoint)
    return checkpoint


def load_reference(source: Path, weights: Arrays) -> Any:
    """Build the transformers model of `source/config.json` around `weights`."""
    config = Qwen4ExpTextConfig.from_json_file(source / "config.json")
    config._attn_implementation = "eager"
    model = Qwen4ExpForCausalLM(config).eval().float()
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    # The output is tied, and the hash constants follow from the configuration.
    assert all(name == "lm_head.weight" or ".ple_embedding." in name for name in missing), missing
    model.tie_weights()
    return model
