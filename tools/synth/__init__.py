"""Parts of ``tools/synth_model.py``: model files of any size with valid random weights."""
