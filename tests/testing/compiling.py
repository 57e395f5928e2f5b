"""Compile models for tests: once per run, and quickly where the compiled programs are not under test."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax._src.compiler
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

# The same mathematics; with JAX's own switch, a training step compiles seven times faster.
OPTIONS: dict[str, bool | int] = {"xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):  # Later versions always use MLIR.
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
FLAGS = tuple(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
# Environment of a server with one robot, which compiles no programs for larger batches.
ONE_ROBOT = {"ROBOJAX_ENGINE_BATCH_SIZES": "1"}
# Environment of a process that compiles like `compiling_quickly`.
QUICK = {"XLA_FLAGS": " ".join(FLAGS), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **ONE_ROBOT}


@contextmanager
def compiling_quickly() -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"]
    get_options: Any = jax._src.compiler.get_compile_options

    def quick_options(*arguments: Any, env_options_overrides: Any = None, **options: Any) -> Any:
        return get_options(*arguments, env_options_overrides=OPTIONS | (env_options_overrides or {}), **options)

    # JAX accepts XLA's options for one program or for a process, not for a part of a process.
    jax._src.compiler.get_compile_options = quick_options
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax._src.compiler.get_compile_options = get_options


PROGRAMS = "PYTEST_PROGRAMS"
WORTH_KEEPING = 1.0  # Seconds of compilation; writing and reading programs of less time takes longer than it saves.


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between all processes of the run; a folder in PYTEST_PROGRAMS keeps them."""
    if PROGRAMS not in os.environ:  # Workers and child processes inherit it.
        folder = os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="robojax-programs-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(PROGRAMS, None))
    use_programs(os.environ[PROGRAMS])
    # If another worker is writing the program at this moment, it is compiled here too.
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")


def use_programs(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    reset_cache()


def process_environment(*, devices: int = 1, quick: bool = False) -> dict[str, str]:
    """Return the environment of a child process that shares the run's programs, with this number of CPU devices."""
    return {
        **os.environ,
        **(ONE_ROBOT if quick else {}),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([f"--xla_force_host_platform_device_count={devices}", *(FLAGS if quick else ())]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
        "JAX_COMPILATION_CACHE_DIR": os.environ[PROGRAMS],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(WORTH_KEEPING),
    }
