"""Load policies, or only their requirements, from folders and from the Hub."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmodels import gates
from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.checkpoints.bundle import install_executables
from jaxmodels.checkpoints.folder import PARAMS, PolicyFolder
from jaxmodels.devices import DTYPES, find_placement
from jaxmodels.errors import ConfigError, HubError
from jaxmodels.hub import POLICY_FILES, fetch, find_policy
from jaxmodels.memory import FLOAT, Needs, check_loading, check_tables, estimate_needs
from jaxmodels.normalization import get_outside_name
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.policies.integrity import check_weights, describe_folder
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.policy import Policy, build_requirements, check_prompt_cut
from jaxmodels.quantization import AUTO, AUTO_DTYPES, find_policy_dtypes
from jaxmodels.types import CUT_TASK, IMAGES, Requirements, camera_name, rename_cameras

# All files but weights and executables.
DESCRIBING = tuple(name for name in POLICY_FILES if not name.startswith(("model", "executables")))


def read_requirements(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    read: Callable[[PolicyFolder], Mapping[str, Any]] = describe_folder,
    roots: Iterable[Path] | None = None,
) -> Requirements:
    """Read what a policy in a folder or on the Hub needs of a robot, without its weights.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        read: reads the files, e.g. in another process.
        roots: see `load_policy`.

    Raises:
        HubError: the repo cannot be fetched.
        ConfigError: the config makes no sense.
        CheckpointError: files are missing or malformed. Weights are not read, so loading may still fail.

    Example:
        >>> requirements = read_requirements("robojax/sim/policy")
        >>> requirements.policy_type, requirements.chunk, requirements.action
        ('act', 20, 6)
    """
    folder = Path(os.path.expanduser(path_or_repo))
    if str(path_or_repo) and folder.is_dir():
        if revision is not None:
            raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
        with PolicyFolder(folder, roots=roots) as opened:
            check_weights(opened, has_orbax=opened.has_tree() or opened.has_tree(PARAMS))
            return _check_description(read(opened))
    # The user's cache must not hold half a policy: it would pass for a whole policy when the Hub cannot be reached.
    with tempfile.TemporaryDirectory(prefix="robojax-description-") as cache:
        try:
            snapshot = fetch(str(path_or_repo), revision, files=DESCRIBING, cache=Path(cache))
        except HubError:
            snapshot = fetch(str(path_or_repo), revision, files=DESCRIBING)
        with PolicyFolder(snapshot, roots=snapshot.parents[1:2]) as opened:
            return _check_description(read(opened))


def _check_description(small: Mapping[str, Any]) -> Requirements:
    """Return the requirements of a policy that is not loaded, after checks of its tables and its statistics."""
    description = lerobot_folder.build_description(small)
    check_tables(description.config)
    lerobot_folder.check_statistics(small, description.config)
    return build_requirements(description)


def load_policy(
    path_or_repo: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    *,
    like: Policy | None = None,
    on_progress: Callable[[str], None] | None = None,
    inspect: Callable[[PolicyFolder], None] | None = None,
    largest: int | None = None,
    roots: Iterable[Path] | None = None,
    rename: Mapping[str, str] | None = None,
    lerobot: str | None = None,
    prompt_cut: str = CUT_TASK,
    platform: str | None = None,
    action_error: float = gates.LIMIT,
) -> Policy:
    """Load a LeRobot policy from a folder or from the Hub.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        dtype: ``float32`` or ``bfloat16``, which is slow on a CPU. None: bfloat16 on an accelerator for policies that
            are built on a language model, else float32. ``int8`` and ``fp8`` quantize large matrices and the
            activations that they multiply, and ``int8-weights`` only the matrices, if the policy passes the gate of
            actions (jaxmodels/gates.py). ``auto``: what passes of these on an accelerator, else the default.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``, or ``cuda:0+cuda:1`` for a policy that is too large for one
            device; JAX's first choice when None.
        like: a policy whose compiled programs are shared when the architecture is the same.
        on_progress: called with ``downloading``, ``reading``, ``ready``.
        inspect: called with the folder before anything in it is read; raises CheckpointError to refuse it.
        largest: maximum bytes of the files of a repo, or of the weights of a folder.
        roots: folders that must contain a folder's files after links are followed; any folder when None.
        rename: the policy's camera names to the robot's, e.g. ``{"camera1": "front"}``.
        lerobot: version of LeRobot, 0.4 or 0.6, that the files are read as; None for ``robojax.json``'s, else 0.6.
        prompt_cut: what is cut from a prompt that is too long when the state follows the instruction (pi0.5): the end
            of the instruction (``task``), or the end of the prompt, which includes joints (``lerobot``).
        platform: platform of JAX (``cpu``, ``gpu``, ``tpu``) for which weights are prepared; the device's when None.
        action_error: largest difference of a quantized policy's actions, as a share of each joint's range.

    Raises:
        HubError: the repo cannot be fetched, or is larger than `largest`.
        ConfigError: the config, dtype, device or names of cameras make no sense, or a quantized policy fails its gate.
        CheckpointError: files are missing, malformed, or do not fit the config.

    Example:
        >>> policy = load_policy("robojax/sim/policy", device="cpu")
        >>> policy.requirements.cameras
        {'front': (96, 96)}
    """
    report = on_progress or (lambda stage: None)
    where = find_placement(device)
    find_policy_dtypes(dtype, where.platform, "float32")  # A wrong name is refused before anything is fetched.
    check_prompt_cut(prompt_cut)

    def admit(config: Any, size: int | Needs) -> None:
        kind = get_policy_type(config.type)
        if isinstance(size, Needs):
            check_loading(size, where, shares_memory=True)
            return
        item = find_policy_dtypes(dtype, where.platform, kind.accelerator_dtype)[0].itemsize
        needs = estimate_needs(size, size + config.table_numbers, item, kind.runs_as_read)
        check_loading(needs, where, shares_memory=kind.runs_as_read and item == FLOAT)

    folder, commit = find_policy(path_or_repo, revision, on_progress=report, largest=largest)
    report("reading")
    # A snapshot of the Hub's cache links to files in a sibling folder.
    with PolicyFolder(folder, roots=roots if commit is None else folder.parents[1:2], largest=largest) as opened:
        if inspect is not None:
            inspect(opened)
        checkpoint = lerobot_folder.read_checkpoint(opened, admit=admit, lerobot=lerobot)
        if checkpoint.bundle is not None:
            install_executables(opened, checkpoint.bundle, where.kind, use_compile_cache())
            dtype = dtype or checkpoint.bundle.dtype
    checkpoint = _rename_checkpoint(checkpoint, rename or {})
    config: Any = checkpoint.config
    usual = find_policy_dtypes(None, platform or where.platform, get_policy_type(config.type).accelerator_dtype)[0].name

    def build(dtype: str) -> Policy:
        if like is not None and (like.dtype, like.device) == (dtype, where.name) and like.fits(checkpoint):
            return like.with_weights(checkpoint, prompt_cut)
        return Policy(checkpoint, dtype=dtype, device=device, prompt_cut=prompt_cut, platform=platform)

    # The matrices of a bundle were tested when it was exported.
    if dtype in (None, *DTYPES) or checkpoint.bundle is not None:
        policy = build(dtype or usual)
    else:
        names = AUTO_DTYPES.get(platform or where.platform, ()) if dtype == AUTO else (dtype,)
        policy = gates.build_gated(build, checkpoint, names, usual, where, action_error, may_fall_back=dtype == AUTO)
    policy.commit = commit
    report("ready")
    return policy


def _rename_checkpoint(checkpoint: Checkpoint, rename: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with a robot's camera names in its pre-processor's renaming step."""
    config: Any = checkpoint.config
    normalization = checkpoint.normalization
    known = lerobot_folder.Description(config, checkpoint.sidecar, normalization.renames)
    rename_cameras(build_requirements(known), rename)  # Raises for wrong names.
    outside = {camera.name: get_outside_name(normalization.renames, camera.name) for camera in config.cameras}
    new = {f"{IMAGES}{rename[name]}": inside for inside in outside if (name := camera_name(outside[inside])) in rename}
    renames = {name: inside for name, inside in normalization.renames.items() if inside not in new.values()} | new
    return replace(checkpoint, normalization=replace(normalization, renames=renames))
