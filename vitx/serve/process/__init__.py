"""Processes of the server: one, several on a port, replicas on Ray."""
