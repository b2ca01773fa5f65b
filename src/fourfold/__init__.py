"""fourfold: train one transformer on many GPUs, split along its four axes."""

__version__ = "0.1.0"
