"""Command `python -m hooks.server.script FILE`: runs the server of a script.

For a Python that cannot start threads at its end (3.12.0, 3.12.1): what serves here is an ordinary main program.
"""

import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from hooks.errors import HooksError
from hooks.server.server import WebhooksServer, get_default_server, is_script_being_loaded


class ServerNotFound(HooksError):
    """No server, or more than one, was found in a script or module."""


def load_server(target: str) -> WebhooksServer:
    """Load the server of ``module``, ``module:name``, ``file.py`` or ``file.py:name``.

    Without a name it is the only ``WebhooksServer`` there, or the one of ``webhook_endpoint``. A ``launch()`` or
    ``run()`` in the module does nothing meanwhile, and what is under ``if __name__ == "__main__"`` is not run.

    Raises:
        ServerNotFound: there is none, or more than one; or the module cannot be found.
        Exception: whatever the module raises.
    """
    module_name, _, name = target.partition(":")
    token = is_script_being_loaded.set(True)
    try:
        module = _import_target(module_name)
    finally:
        is_script_being_loaded.reset(token)
    get_default_server().cancel_start_at_exit()
    if name:
        servers_by_name = getattr(module, name, None)
        if not isinstance(servers_by_name, WebhooksServer):
            raise ServerNotFound(
                f"{module_name}: {name!r} is {type(servers_by_name).__name__}; wanted the name of a WebhooksServer"
            )
        return servers_by_name
    servers = {id(value): (key, value) for key, value in vars(module).items() if isinstance(value, WebhooksServer)}
    if len(servers) > 1:
        names = ", ".join(key for key, _ in servers.values())
        raise ServerNotFound(f"{module_name} has several servers ({names}); say which one: {module_name}:NAME")
    if servers:
        return next(iter(servers.values()))[1]
    if get_default_server().registered_webhooks:
        return get_default_server()
    raise ServerNotFound(f"{module_name} has no WebhooksServer and no function with @webhook_endpoint")


def _import_target(target: str) -> ModuleType:
    path = Path(target)
    if path.suffix != ".py":
        sys.path.insert(0, "")
        try:
            return importlib.import_module(target)
        except ModuleNotFoundError as error:
            # One that the module itself imports is the module's own trouble.
            if error.name is None or not (target == error.name or target.startswith(f"{error.name}.")):
                raise
            raise ServerNotFound(f"there is no module {target!r}; give a module, or the path of a .py file") from None
    if not path.is_file():
        raise ServerNotFound(f"there is no file {target!r}")
    # As when it is run as a script, its neighbours can be imported.
    sys.path.insert(0, str(path.absolute().parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_webhooks"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the script as the main program, then serve."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit("usage: python -m hooks.server.script FILE [ARGUMENT ...] | -m MODULE [ARGUMENT ...]")
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
        get_default_server().cancel_start_at_exit()
        raise
    # Cancelled, because this process too would begin anew at its end.
    if get_default_server().cancel_start_at_exit():
        try:
            get_default_server().launch()
        except HooksError as error:
            sys.exit(f"webhooks: {error}")


if __name__ == "__main__":
    main()
