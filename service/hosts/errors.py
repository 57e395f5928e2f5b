"""What goes wrong between hosts; each text is safe to show."""

from jaxmodels.errors import JaxModelsError
from service.errors import DeviceAway


class HostsLost(DeviceAway, JaxModelsError):
    """A host of several is gone or failed, and nothing can be computed any more until all are started anew."""

    code = "hosts_lost"


class HostSilent(DeviceAway, JaxModelsError):
    """A host of several has said nothing for a while, and what all of them compute waits for it; it may come back."""

    code = "host_silent"


class HostRefused(JaxModelsError):
    """Another host cannot do what this one can; the text says which, and why."""


class HostGone(Exception):
    """The process of another host ended, or its machine did; the text says what Ray knows."""


class HostFailed(Exception):
    """A program raised on another host what no policy raises; the text says what, and its log says more."""
