"""``predict``: the command, and the step of a user's own module that it measures."""
