"""Prints which of the modules that the programs in tests/healthy need are installed."""

import importlib.util

NEEDED = "lightning transformers accelerate jax flax wandb safetensors megatron"
print(*(name for name in NEEDED.split() if importlib.util.find_spec(name)))
