"""What travels instead of fp32, and how it is read again: wire formats. Pure: no Lightning, no process groups."""
