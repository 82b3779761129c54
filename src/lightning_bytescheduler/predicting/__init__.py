"""``predict``: the command, and the step of a user's own module that it measures."""

STEPS = 10
"""How many steps of a module are timed."""
