"""For engines that run compiled policies."""

from collections.abc import Iterator

import pytest

from tests.testing.compiling import compiling_quickly


@pytest.fixture(scope="module")
def compilation() -> Iterator[None]:
    """What a module's policies compile is compiled quickly, and not kept on the disk."""
    with pytest.MonkeyPatch.context() as patch, compiling_quickly():
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        yield
