"""Pages of long lists: query parameters, building in a thread, address of the next page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlencode

from sanic import HTTPResponse

from service.api.context import Query, Request
from service.errors import InvalidRequest
from service.http.bodies import encode_json
from service.threads import WorkerThread

Entry = TypeVar("Entry")
Rows: TypeAlias = Sequence[Mapping[str, Any]]
# Returns the rows of a page and the ``before`` of the next page, which is None at the end of the list.
BuildPage: TypeAlias = Callable[[int, str | None], tuple[Rows, str | None]]

DEFAULT_LIMIT, MAX_LIMIT = 100, 500
LIMIT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}


def page_query(key: str) -> tuple[Query, Query]:
    """Return the query parameters of a list whose entries are identified by the field ``key``."""
    return (
        Query("limit", LIMIT_SCHEMA, "Entries of a page."),
        Query(
            "before",
            {"type": "string"},
            f"{key} of the oldest entry of the page before this one. The header Link of an answer has the address of "
            "the next page; the last page has no such header.",
        ),
    )


def take_page(
    entries: Iterable[Entry], identify: Callable[[Entry], str], limit: int, before: str | None
) -> tuple[list[Entry], str | None]:
    """Return the entries that follow the entry ``before``, and the ``before`` of the next page.

    Args:
        entries: newest first.
        identify: returns the id of an entry.
        before: id of the last entry of the page before; None for the first page.

    Raises:
        InvalidRequest: the list has no such entry.
    """
    remaining = iter(entries)
    if before is not None and not any(identify(entry) == before for entry in remaining):
        raise InvalidRequest(
            f"before is {before[:120]!r}, which is not in the list (any more); begin again without before",
            ("query", "before"),
        )
    page = list(islice(remaining, limit + 1))
    return page[:limit], identify(page[limit - 1]) if len(page) > limit else None


async def answer_page(
    request: Request, worker: WorkerThread, build: BuildPage, field: str | None = None
) -> HTTPResponse:
    """Answer with a page of a list, which is built and encoded in a thread.

    Args:
        worker: thread for all lists.
        field: field of the response with the rows; None if the response is the list itself.

    Raises:
        InvalidRequest: a query parameter cannot be used.
    """
    sent = request.get_args(keep_blank_values=True)
    query = {name: str(values[0]) for name, values in sent.items() if name != "ticket"}  # a ticket is valid once
    limit, before = _read_limit(query.get("limit", str(DEFAULT_LIMIT))), query.get("before")

    def build_text() -> tuple[str, str | None]:
        rows, following = build(limit, before)
        # Row by row, because the encoder holds Python's lock.
        text = f"[{','.join(map(encode_json, rows))}]"
        return text if field is None else f"{{{encode_json(field)}:{text}}}", following

    text, following = await worker.submit(build_text)
    # The link is relative, because a proxy may serve another path.
    headers = {} if following is None else {"link": f'<?{urlencode({**query, "before": following})}>; rel="next"'}
    return HTTPResponse(text, headers=headers, content_type="application/json")


def _read_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is {text[:20]!r}; wanted a whole number from 1 to {MAX_LIMIT}", ("query", "limit"))
    return int(text)
