"""Compiled forms of a graph: TensorRT, TensorRT for RTX, OpenVINO."""
