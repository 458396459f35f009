"""Server processes: one, several on a port, replicas on Ray."""
