"""Which things can be registered as a webhook."""

import inspect
from typing import Any


def check_function(function: Any) -> None:
    """Refuse what cannot be called with a delivery.

    Raises:
        TypeError: it is a class, a method without its object, or nothing that is called at all.
    """
    if isinstance(function, classmethod | property) or not callable(function):
        raise TypeError(
            f"a webhook is a function: found {kind_of(function)}. In a class, register the method of an object: "
            "server.add_webhook(robot.on_push)"
        )
    if inspect.isclass(function):
        raise TypeError(f"a webhook is a function: found the class {function.__name__}")
    if inspect.isfunction(function) and "." in function.__qualname__.rpartition("<locals>.")[2]:
        first = next(iter(inspect.signature(function).parameters), None)
        if first in ("self", "cls"):
            raise TypeError(
                f"{function.__qualname__} is a method and wants an object, which nobody has yet; register that of an "
                f"object: server.add_webhook(robot.{function.__name__})"
            )


def kind_of(value: object) -> str:
    """What a value is, for an error's text."""
    return f"{type(value).__name__} {value!r:.60}"
