"""Conversion of Hugging Face checkpoints: `python -m convert SRC DST`."""
