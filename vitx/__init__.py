"""vitx: vision transformers that do not over-smooth, from training to a proved deployment."""

__version__ = "0.1.0"
