"""What to expect of a user's own model on a network: measuring its steps, and saying it in words. No Lightning here."""
