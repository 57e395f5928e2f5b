"""How the sessions of a server reach their rooms over the network, and where those may be."""

from pathlib import Path

from service.auth.room_keys import RoomKeys
from service.auth.watched import FileUnusable
from service.edge.destinations import AddressRules, Destinations
from service.routes.context import App
from service.settings import SettingsError
from service.transport.client import RoomsTransport


def destinations_of(app: App, rules: AddressRules) -> Destinations:
    """The transport servers that sessions may be sent to.

    Raises:
        SettingsError: one that is named cannot be meant.
    """
    try:
        return Destinations(app.ctx.settings.transport_hosts, rules, lambda: app.config.get("OWN_PORT"))
    except ValueError as error:
        raise SettingsError(f"transport_hosts: {error}") from error


def rooms_transport(app: App, destinations: Destinations | None) -> RoomsTransport:
    """The RobotHub wire.

    Raises:
        SettingsError: the file of keys for other transport servers cannot be used.
    """
    return RoomsTransport(
        ice_servers=app.ctx.settings.ice_servers, destinations=destinations, credentials=_room_keys(app)
    )


def _room_keys(app: App) -> RoomKeys:
    settings = app.ctx.settings
    named = None if settings.transport_key_file is None else Path(settings.transport_key_file).expanduser()
    keys = RoomKeys(
        app.ctx.guard.admissions.own,
        lambda: app.config.get("OWN_ADDRESS") if settings.embedded_transport else None,
        lambda session_id: app.ctx.sessions.get(session_id).new.owner,
        named,
        lambda session_id: app.ctx.sessions.get(session_id).claim,
    )
    try:
        keys.check()
    except FileUnusable as error:
        raise SettingsError(f"transport_key_file: {error}") from error
    return keys
