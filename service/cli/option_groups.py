"""Groups of options that several commands share: a dataclass whose fields are annotated as Typer wants them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer: a parameter that is a group becomes an option for each field of its dataclass."""
    hints = get_type_hints(function).items()
    groups: dict[str, type] = {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        function(**given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        parameters += [parameter] if group is None else inspect.signature(group).parameters.values()
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return command
