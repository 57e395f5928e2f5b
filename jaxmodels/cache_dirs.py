"""Folders of caches, and JAX's persistent compilation cache."""

import logging
import os
import tempfile
from pathlib import Path

OFF = ("", "0", "off", "none", "false")


def user_cache() -> Path:
    """Return the user's cache folder: ``XDG_CACHE_HOME``, else ``~/.cache`` (specification of freedesktop.org).

    Example:
        >>> user_cache().is_absolute()
        True
    """
    # An empty variable counts as not set, as in the specification.
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cache_folder(name: str, asked: str | None = None) -> Path | None:
    """Return the folder of a cache: `asked`, or ``robojax/NAME`` in the user's cache folder; None for ``off``.

    Example:
        >>> cache_folder("frames", "/data/frames"), cache_folder("frames", "off")
        (PosixPath('/data/frames'), None)
        >>> cache_folder("frames").relative_to(user_cache())
        PosixPath('robojax/frames')
    """
    if asked is None:
        return user_cache() / "robojax" / name
    return None if asked.lower() in OFF else Path(asked).expanduser()


def hub_cache() -> Path:
    """Return the Hub's cache folder: ``HF_HUB_CACHE``, else ``hub`` in ``HF_HOME`` or in the user's cache folder.

    Example:
        >>> hub_cache().is_absolute()
        True
    """
    home = os.environ.get("HF_HOME") or user_cache() / "huggingface"
    # huggingface_hub reads the environment once, when it is imported.
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


VARIABLE = "ROBOJAX_COMPILE_CACHE"

logger = logging.getLogger(__name__)


def use_compile_cache() -> Path | None:
    """Switch on JAX's persistent compilation cache, unless the caller configured one; returns its folder.

    It is ``ROBOJAX_COMPILE_CACHE`` (a folder, or ``off``), else ``robojax/xla`` in the user's cache folder. A folder
    that cannot be written is logged, and nothing is cached.
    """
    import jax  # Imported here, because a server's process needs the folders but has no JAX.

    # Otherwise the path of the folder is part of each entry's key, and the executables of a bundle have other keys.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    configured = jax.config.values.get("jax_compilation_cache_dir")
    if configured:
        return Path(configured)
    folder = cache_folder("xla", os.environ.get(VARIABLE))
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.info("no compile cache: %s (%s); set %s to a folder that can be written", folder, error, VARIABLE)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
