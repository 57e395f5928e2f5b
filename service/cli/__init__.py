"""The console command ``robojax``."""

from service.cli.commands import main

__all__ = ["main"]
