"""A policy from a folder or from the Hub, read and put on its device."""

from collections.abc import Callable, Iterable
from pathlib import Path

from jaxmodels.checkpoints import lerobot
from jaxmodels.checkpoints.folder import PolicyFolder
from jaxmodels.devices import find_dtype
from jaxmodels.finding import find_policy
from jaxmodels.memory import check_loading
from jaxmodels.placement import find_placement
from jaxmodels.policy import Policy


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
) -> Policy:
    """Reads a LeRobot policy from a folder or from the Hub.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        dtype: ``float32`` (default) or ``bfloat16``, which is meant for accelerators and slow on a CPU.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``, ``cuda:0+cuda:1`` for a policy too large for one of them;
            JAX's first choice when None.
        like: a policy whose compiled programs are shared when the architecture is the same.
        on_progress: told ``downloading``, ``reading``, ``ready``.
        inspect: given the folder, whose files are open, before anything in it is read; raises CheckpointError when it
            should not be.
        largest: bytes that the files of a repo may have, asked before they are fetched, or the weights of a folder.
        roots: folders that a folder's files have to be in, wherever links lead to; anywhere when None. A repo's are in
            the Hub's cache.

    Raises:
        HubError: the repo cannot be fetched, or is larger.
        ConfigError: the config, dtype or device makes no sense.
        CheckpointError: files are missing, malformed, or do not fit the config.
    """
    tell = on_progress or (lambda stage: None)
    where, compute = find_placement(device), find_dtype(dtype)
    folder, commit = find_policy(path_or_repo, revision, on_progress=tell, largest=largest)
    tell("reading")
    # A snapshot of the Hub's cache links to files beside it.
    with PolicyFolder(folder, roots=roots if commit is None else folder.parents[1:2], largest=largest) as opened:
        if inspect is not None:
            inspect(opened)
        checkpoint = lerobot.read(opened, admit=lambda sizes: check_loading(sizes, where, compute.itemsize))
    same_place = like is not None and (like.dtype, like.device) == (compute.name, where.name)
    if like is not None and same_place and like.fits(checkpoint):
        policy = like.with_weights(checkpoint)
    else:
        policy = Policy(checkpoint, dtype=dtype, device=device)
    policy.commit = commit
    tell("ready")
    return policy
