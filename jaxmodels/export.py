"""Export of a policy as a bundle: weights as they are served, StableHLO, and executables for a fast start.

A bundle is a folder that `load_policy` loads on the platform for which it was exported. Its executables are entries of
JAX's compilation cache, and loading them runs code. Therefore only trusted bundles may use them: bundles that this user
exported, and bundles whose digest the operator named. The other files are data.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.checkpoints.bundle import EXECUTABLES, EXPORTED, Manifest, hash_files, trust
from jaxmodels.checkpoints.files import write_json, write_policy_weights, write_safetensors
from jaxmodels.checkpoints.folder import BUNDLE
from jaxmodels.devices import PLATFORMS, find_placement
from jaxmodels.errors import ConfigError
from jaxmodels.loading import load_policy
from jaxmodels.policies import lerobot_folder


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written, and the digest that identifies its content."""

    folder: Path
    manifest: Manifest
    digest: str


def export_policy(
    path_or_repo: str | Path,
    folder: str | Path,
    platform: str,
    *,
    batch_sizes: Sequence[int] = (1,),
    on_progress: Callable[[str], None] = lambda step: None,
    **options: Any,
) -> Bundle:
    """Write a policy as a bundle, with executables if this machine has a device of the platform.

    Args:
        path_or_repo: as of `load_policy`.
        folder: a folder that does not exist, or is empty.
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``.
        batch_sizes: batch sizes of StableHLO programs and executables.
        on_progress: called with each step.
        options: further arguments of `load_policy`, e.g. `revision`, `dtype`, `rename`.

    Raises:
        ConfigError: the platform is unknown, the policy is a bundle, or the folder has files.
        JaxModelsError: as of `load_policy`.

    Example:
        >>> from jaxmodels import load_policy
        >>> with TemporaryDirectory() as place:
        ...     bundle = export_policy("robojax/sim/policy", f"{place}/act-cpu", "cpu")
        ...     load_policy(bundle.folder).dtype, bundle.manifest.batch_sizes
        ('float32', (1,))
    """
    if platform not in EXPORTED:
        raise ConfigError(f"platform is {platform!r}; wanted one of {', '.join(EXPORTED)}")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another folder")
    try:
        device = find_placement(platform).name
    except ConfigError:
        device = "cpu"
    target = PLATFORMS.get(platform, platform)
    policy = load_policy(path_or_repo, device=device, platform=target, on_progress=on_progress, **options)
    if policy.checkpoint.bundle is not None:
        raise ConfigError("the policy is a bundle; export the folder that the bundle was made from")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        draft = Path(name) / "bundle"
        (draft / "stablehlo").mkdir(parents=True)
        on_progress("writing weights")
        lerobot_folder.write_description(draft, policy.checkpoint)
        write_policy_weights(draft, policy.get_serving_weights())
        variants = {"": False, "_plan": True} if policy.requirements.takes_prefix else {"": False}
        for batch in batch_sizes:
            on_progress(f"lowering batch {batch} to StableHLO")
            for name, with_plan in variants.items():
                lowered = policy.export(platform, batch, with_plan=with_plan).mlir_module_serialized
                (draft / "stablehlo" / f"batch_{batch}{name}.mlirbc").write_bytes(lowered)
        placement = find_placement(policy.device)
        is_here = placement.platform == policy.platform
        if is_here:
            with _collect_executables(draft / EXECUTABLES):
                for batch in batch_sizes:
                    on_progress(f"compiling batch {batch}")
                    policy.compile(batch, with_plan=True)
        files = sorted(path for path in draft.rglob("*") if path.is_file())
        hashes = zip((str(path.relative_to(draft)) for path in files), hash_files(files), strict=True)
        manifest = Manifest(
            robojax=version("robojax"),
            platform=platform,
            dtype=policy.dtype,
            batch_sizes=tuple(batch_sizes),
            device=placement.kind if is_here else None,
            jaxlib=version("jaxlib") if is_here else None,
            files=dict(hashes),
        )
        write_json(draft / BUNDLE, manifest.to_json(), indent=2)
        digest = hash_files([draft / BUNDLE])[0]
        trust(digest)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    return Bundle(folder, manifest, digest)


@contextmanager
def _collect_executables(file: Path) -> Iterator[None]:
    """Write all executables that are compiled in the context to a safetensors file."""
    use_compile_cache()  # It sets the options on which the keys of entries depend.
    options = {"jax_compilation_cache_dir": "", "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: jax.config.values[name] for name in options}
    with TemporaryDirectory() as cache:
        try:
            for name, value in {**options, "jax_compilation_cache_dir": cache}.items():
                jax.config.update(name, value)
            reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            reset_cache()
        entries = {path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in Path(cache).glob("*-cache")}
        write_safetensors(file, entries)
