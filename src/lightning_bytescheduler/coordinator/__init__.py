"""The coordinator: a service on one port for DiLoCo trainings whose workers join and leave, and its commands."""
