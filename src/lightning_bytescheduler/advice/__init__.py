"""What to expect of a user's own model on a network: its steps are measured, and said in figures and in words."""
