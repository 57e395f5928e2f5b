"""Command `token`: API keys and bearer tokens, on the server's machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from robojax.cli.app import Code, fail, print_table

TITLE = "Manage the keys and tokens of a server"
app = typer.Typer(help=TITLE, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Role = Annotated[str, typer.Option(help="viewer: reads; operator: creates and moves own sessions; admin: everything")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the server, which selects its state folder")]
State = Annotated[str | None, typer.Option(help="State folder of the server; default: the folder of its port")]
KeysFile = Annotated[str | None, typer.Option(help="File of keys, if the server has --keys-file")]
Owner = Annotated[str | None, typer.Option(help="Owner of the sessions that it may use; default: its name")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def new(
    role: Role,
    name: Annotated[str | None, typer.Option(help="Name of the key in the list and the log")] = None,
    days: Annotated[float | None, typer.Option(help="Lifetime of the key in days; default: no limit")] = None,
    owner: Owner = None,
    all_owners: Annotated[bool, typer.Option("--all", help="Allow the sessions of all owners")] = False,
    port: Port = None,
    state: State = None,
    keys_file: KeysFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once. A running server accepts it at once; after its first key it requires keys."""
    import json
    import secrets
    import time

    from service.auth.caller import Role as Roles

    file = _keys(port, state, keys_file)
    name = name or f"{role}-{secrets.token_hex(3)}"
    try:
        of = Roles.parse(role)
    except ValueError as error:
        fail(Code.USAGE, "no key was created", str(error), "robojax token new --help describes the roles")
    if owner is not None and all_owners:
        fail(Code.USAGE, "no key was created", "--owner and --all exclude each other", "give only one option")
    with _end_on_errors("no key was created"):
        key = file.create(name, of, None if all_owners else owner or name, time.time(), days)
    if as_json:
        typer.echo(json.dumps({"name": name, "role": str(of), "key": key}))
        return
    typer.echo(key)
    typer.echo(f"key {name!r} ({of}) is in {file.path} as a hash; it is shown only once", err=True)
    typer.echo("use it: export ROBOJAX_KEY=...; over HTTP: X-API-Key or Authorization: Bearer", err=True)


@app.command("list")
def list_(port: Port = None, state: State = None, keys_file: KeysFile = None, as_json: AsJson = False) -> None:
    """List names, roles and owners of the keys."""
    import json
    import time
    from datetime import UTC, datetime

    def when(at: float | None) -> str | None:
        return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="minutes")

    file = _keys(port, state, keys_file)
    with _end_on_errors("the keys cannot be listed"):
        keys = file.read_keys()
    listed = [
        {
            "name": key.name,
            "role": str(key.role),
            "owner": key.owner,
            "made_at": when(key.made_at),
            "expires_at": when(key.expires_at),
            "is_over": key.is_expired(time.time()),
        }
        for key in keys
    ]
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    if not keys:
        typer.echo(f"no keys in {file.path}; robojax token new --role operator creates a key")
        return
    rows = []
    for name, role, owner, made_at, expires_at, is_over in (key.values() for key in listed):
        until = (expires_at or "when it is revoked") + (" (over)" if is_over else "")
        rows.append((name, role, "everybody" if role == "admin" else owner or "everybody", made_at or "", until))
    print_table(("name", "role", "sessions of", "made", "ends"), rows)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key")],
    port: Port = None,
    state: State = None,
    keys_file: KeysFile = None,
) -> None:
    """Revoke a key; a running server refuses it at once, and closes its sockets within seconds."""
    file = _keys(port, state, keys_file)
    with _end_on_errors("no key was revoked"):
        revoked = file.revoke(name)
        left = len(file.read_keys())
    typer.echo(f"key {revoked.name!r} ({revoked.role}) is revoked; {left} left in {file.path}")
    if not left:
        typer.echo("a running server now accepts no keys; a new server accepts this machine without a key", err=True)


@app.command()
def jwt(
    role: Role,
    name: Annotated[str, typer.Option(help="Name of the caller")],
    hours: Annotated[float, typer.Option(help="Lifetime of the token in hours")] = 1.0,
    owner: Owner = None,
    port: Port = None,
    state: State = None,
    secret_file: Annotated[
        str | None, typer.Option("--jwt-secret-file", help="File of the secret, if the server has --jwt-secret-file")
    ] = None,
) -> None:
    """Sign a bearer token, which cannot be revoked. The first token creates the file of the secret."""
    import time

    from robojax.cli.serve import settings_or_end
    from service.auth.caller import Role as Roles
    from service.auth.config import secret_path
    from service.auth.tokens import BadToken, SecretFile

    settings = settings_or_end({"port": port, "state": state, "jwt_secret_file": secret_file}).with_state()
    path = secret_path(settings.access, settings.webhooks.state)
    if path is None:
        _refuse_without_state("no token was signed", "--jwt-secret-file")
    file = SecretFile(path, settings.access.jwt_hours * 3600)
    with _end_on_errors("no token was signed"):
        try:
            typer.echo(file.create().sign(name, Roles.parse(role), hours * 3600, time.time(), owner))
        except (BadToken, ValueError, OverflowError) as error:
            fail(Code.USAGE, "no token was signed", str(error), "robojax token jwt --help")


def _keys(port: int | None, state: str | None, keys_file: str | None) -> Any:
    from robojax.cli.serve import settings_or_end
    from service.auth.config import keys_path
    from service.auth.keys import KeyFile

    settings = settings_or_end({"port": port, "state": state, "keys_file": keys_file}).with_state()
    path = keys_path(settings.access, settings.webhooks.state)
    if path is None:
        _refuse_without_state("there is no place for keys", "--keys-file")
    return KeyFile(path)


def _refuse_without_state(what: str, flag: str) -> NoReturn:
    why = "a server on any free port, or with --state off, stores nothing"
    fail(Code.USAGE, what, why, f"give --port, --state or {flag} as the server has it")


@contextmanager
def _end_on_errors(what: str) -> Iterator[None]:
    """End the command with an error message for errors within the context."""
    from service.auth.keys import KeyRefused
    from service.reloading_file import FileUnusable

    try:
        yield
    except (KeyRefused, FileUnusable) as error:
        fail(Code.USAGE, what, str(error), "robojax token --help")
