"""For engines that run compiled policies."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_compile_cache() -> Iterator[None]:
    """What a module's policies compile is not kept on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        yield
