"""What the results say of this network, and what differs between two: statements that passed a test."""
