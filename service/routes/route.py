"""One operation of the API: where it is, what answers, and what the OpenAPI documents say of it."""

import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from sanic import HTTPResponse

from service.auth.roles import Role

Handler = Callable[..., Coroutine[Any, Any, HTTPResponse | None]]


@dataclass(frozen=True)
class Query:
    """An optional query parameter."""

    name: str
    schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True)
class Route:
    """A row of the route table.

    The handler's name gives the operation id and summary as FastAPI makes them, its docstring the description.

    Attributes:
        path: with ``{session_id}`` parts, as OpenAPI writes them.
        tag: the group in the documents.
        answer: JSON schema or model of the 200 answer.
        content_type: of the 200 answer.
        is_specified: whether it is part of the specification's document.
        body: model of the request's body.
        specified_body: what the specification's document has in its place.
        errors: other statuses it answers with.
        optional_body: JSON schema of a body that may be left out.
        forms: content type to JSON schema of bodies in several forms.
        answer_forms: of the 200 answer, besides its usual content type.
        query: its query parameters.
        is_patient: it may take longer than other answers.
        is_streamed: it reads its body itself, and holds it to a limit of its own.
        is_stop: it stops robots, and is let in where nothing else is.
        is_own: this very server answers, on whichever of a cluster's servers the session is.
        role: the least role of a key that may call it; None lets everybody in.
    """

    method: str
    path: str
    handler: Handler
    tag: str
    answer: Mapping[str, Any] | type[BaseModel] = field(default_factory=dict)
    content_type: str = "application/json"
    is_specified: bool = False
    body: type[BaseModel] | None = None
    specified_body: type[BaseModel] | None = None
    optional_body: Mapping[str, Any] | None = None
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answer_forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query: tuple[Query, ...] = ()
    errors: tuple[int, ...] = ()
    is_patient: bool = False
    is_streamed: bool = False
    is_stop: bool = False
    is_own: bool = False
    role: Role | None = Role.ADMIN

    @property
    def name(self) -> str:
        """The handler's."""
        return getattr(self.handler, "__name__", type(self.handler).__name__)

    @property
    def operation_id(self) -> str:
        """As FastAPI makes it of function name, path and method."""
        return re.sub(r"\W", "_", f"{self.name}{self.path}") + f"_{self.method.lower()}"

    @property
    def summary(self) -> str:
        """The function name as a title."""
        return self.name.replace("_", " ").title()

    @property
    def description(self) -> str:
        """The docstring."""
        return inspect.getdoc(self.handler) or ""

    @property
    def parts(self) -> list[str]:
        """Names of the path's variable parts."""
        return re.findall(r"{(\w+)}", self.path)

    @property
    def sanic_path(self) -> str:
        """The path as Sanic writes it."""
        return re.sub(r"{(\w+)}", r"<\1:str>", self.path)
