"""``python -m hooks.serving.script FILE`` (or ``-m MODULE``): a script, and then the server of its endpoints.

For a Python that cannot start threads at its end (3.12.0, 3.12.1): what serves here is an ordinary main program.
"""

import os
import runpy
import sys

from hooks.errors import HooksError
from hooks.serving.endpoint import the_server


def main() -> None:
    """Run the script as its own main program, then serve."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit("usage: python -m hooks.serving.script FILE [ARGUMENT ...] | -m MODULE [ARGUMENT ...]")
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit:
        pass  # an end like any other, as where the server starts in the script's own process
    except BaseException:
        the_server().cancel_start_at_exit()
        raise
    # Cancelled, because this process too would begin anew at its end.
    if the_server().cancel_start_at_exit():
        try:
            the_server().launch()
        except HooksError as error:
            sys.exit(f"webhooks: {error}")


if __name__ == "__main__":
    main()
