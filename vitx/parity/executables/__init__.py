"""A verdict for every executable of a bundle, on the machine where it runs. Semantics: docs/parity.md."""
