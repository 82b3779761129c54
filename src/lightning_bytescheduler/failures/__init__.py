"""Who failed, and why: every rank gets to know, and none waits for good."""
