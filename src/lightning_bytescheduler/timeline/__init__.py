"""What a step's tasks did when: recorded, written as a Chrome trace, read back and drawn."""
