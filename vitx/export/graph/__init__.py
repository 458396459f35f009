"""From a network to an ONNX graph that holds the operators it should."""
