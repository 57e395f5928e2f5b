"""``python -m service.cli`` is ``robojax``."""

from service.cli.commands import main

main()
