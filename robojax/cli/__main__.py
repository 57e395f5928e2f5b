"""``python -m robojax.cli`` is ``robojax``."""

from robojax.cli.app import main

main()
