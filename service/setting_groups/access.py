"""Who is let in: keys, bearer tokens, and keys for the rooms of other servers."""

from pydantic import Field, FiniteFloat

from service.setting_groups.group import Group


class AccessSettings(Group):
    """Access"""

    insecure: bool = Field(
        default=False,
        description="Let everybody who reaches the port in, also from other machines, although no key is there.",
    )
    keys_file: str | None = Field(
        default=None,
        description="File of the keys that `robojax token new` makes; default: keys.json in the state folder. With a "
        "key in it, a key is wanted from everybody.",
    )
    jwt_secret_file: str | None = Field(
        default=None,
        description="File with the secret that signs bearer tokens; default: jwt-secret in the state folder, which "
        "`robojax token jwt` makes.",
    )
    jwt_hours: FiniteFloat = Field(default=24.0, gt=0, le=720, description="Hours that a bearer token may live.")
    transport_key_file: str | None = Field(
        default=None,
        description="File with lines of URL and key, for sessions whose rooms are on another server that wants one.",
    )
