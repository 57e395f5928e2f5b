"""Calls that are defined once, for classes that block and for classes with an event loop."""

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import isawaitable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

T = TypeVar("T")
P = ParamSpec("P")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine whose calls block and never suspend, so it needs no event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a coroutine of a synchronous client suspended")


class Blocking:
    """Base of classes for programs without an event loop; their calls block."""

    is_async = False


class Suspending:
    """Base of classes for programs with an event loop; their calls are coroutines."""

    is_async = True


class shared_call(Generic[P, T]):  # noqa: N801
    """Decorator of a coroutine method that defines one call of a synchronous and of an asynchronous class.

    In subclasses of ``Suspending``, the call is the coroutine method. In subclasses of ``Blocking``, it is a function
    that returns the result. Shared methods do not call each other, because the result depends on the class.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]):
        @wraps(method)
        def call(self: Any, *arguments: P.args, **named: P.kwargs) -> T:
            return run_blocking(method(self, *arguments, **named))

        self._suspending, self._blocking = method, call

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Suspending, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        function = self._blocking if issubclass(owner, Blocking) else self._suspending
        return function if instance is None else MethodType(function, instance)


async def finish(result: Any) -> Any:
    """Return the result of a call to a library, which is awaited if the library is asynchronous."""
    return await result if isawaitable(result) else result
