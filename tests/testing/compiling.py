"""Compiling models for tests: quickly, where the programs themselves are not the subject."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax._src.compiler

# Fusions are written to LLVM directly and not through MLIR, and LLVM gets all of them at once: together with JAX's own
# switch a seventh of the time to compile a step of training, the same mathematics.
OPTIONS: dict[str, bool | int] = {"xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):  # later ones always go through MLIR
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
# The same for a process that a test starts.
FLAGS = tuple(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


@contextmanager
def compiling_quickly() -> Iterator[None]:
    """XLA without its slow passes."""
    before = jax.config.values["jax_disable_most_optimizations"]
    get_options: Any = jax._src.compiler.get_compile_options

    def quick_options(*arguments: Any, env_options_overrides: Any = None, **options: Any) -> Any:
        return get_options(*arguments, env_options_overrides=OPTIONS | (env_options_overrides or {}), **options)

    # JAX takes XLA's options for one program, or for a process, not for a part of one.
    jax._src.compiler.get_compile_options = quick_options
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax._src.compiler.get_compile_options = get_options
