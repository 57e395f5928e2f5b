"""Which devices can be relied on: one that fails where another answers is not asked any more."""

# Failures in a row, each of which another device made good. One may be chance, an input that only one of them stumbles
# over; a device that is gone fails each time.
ALLOWED = 3


class DeviceHealth:
    """Of all devices by their names; one that is out stays out until the server starts anew."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._out: dict[str, str] = {}

    def is_out(self, device: str) -> bool:
        """Whether it is not to be asked any more."""
        return device in self._out

    def why(self, device: str) -> str | None:
        """What it failed with last, when it is out."""
        return self._out.get(device)

    @property
    def out(self) -> tuple[str, ...]:
        """All that are."""
        return tuple(self._out)

    def answered(self, device: str) -> None:
        """It works: what was before is forgotten."""
        self._failures.pop(device, None)

    def failed(self, device: str, what: str) -> bool:
        """Another device answered what this one did not, and what that was; whether it is out from now on."""
        if device in self._out:
            return False
        self._failures[device] = self._failures.get(device, 0) + 1
        return self._failures[device] >= ALLOWED and self.take_out(device, what)

    def forget(self, device: str) -> None:
        """It left, and no other one will have its name."""
        self._failures.pop(device, None)
        self._out.pop(device, None)

    def take_out(self, device: str, what: str) -> bool:
        """It is known that it does not work; whether it is out from now on."""
        if device in self._out:
            return False
        self._out[device] = what
        return True
