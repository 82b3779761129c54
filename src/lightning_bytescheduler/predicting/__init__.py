"""``predict``: the command, and the measurement of a step of the user's module."""
