"""``python -m lightning_bytescheduler``: the same as the console command ``lightning-bytescheduler``."""

from lightning_bytescheduler.cli import main

raise SystemExit(main())
