"""Re-Attention without N×N maps in memory: Triton kernels and the operator around them."""
