"""From a network to an ONNX graph that holds the operators it should."""

# Batches that are never traced, at which the graph must equal the network: smaller and larger than the example.
CHECKED_BATCHES = (1, 3)
