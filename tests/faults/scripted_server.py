"""``python -m tests.faults.scripted_server serve ...``: the command ``robojax``, whose policies follow a script."""

from functools import partial

import service.app
from service.cli.commands import main
from tests.faults.script import load

if __name__ == "__main__":
    service.app.create_app = partial(service.app.create_app, load=load)
    main()
