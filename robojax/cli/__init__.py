"""The console command `robojax`."""

from robojax.cli.app import main

__all__ = ["main"]
