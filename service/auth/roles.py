"""Roles of keys, from the least to the most."""

from enum import IntEnum


class Role(IntEnum):
    """What a key may do; a higher one may do all that a lower one may. An emergency stop is allowed to every key."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def named(cls, name: str) -> "Role":
        """The role of this name.

        Raises:
            ValueError: there is none; the message lists them.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"role {name!r} is not known; wanted {', '.join(map(str, cls))}") from None
