"""The training loop: inputs, steps, checkpoints that resume bit for bit, several processes."""
