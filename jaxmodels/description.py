"""What a policy says of itself, without its weights: enough to see whether it fits before anything is loaded."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmodels.checkpoints import lerobot
from jaxmodels.checkpoints.folder import PolicyFolder
from jaxmodels.checkpoints.proof import check_weights, read_small
from jaxmodels.errors import ConfigError, HubError
from jaxmodels.features import camera_name
from jaxmodels.hub import POLICY_FILES, fetch
from jaxmodels.policies import policy_type
from jaxmodels.sizes import Sizes
from jaxmodels.types import Requirements

DESCRIBING = tuple(name for name in POLICY_FILES if name != lerobot.WEIGHTS)


def read_requirements(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    read: Callable[[PolicyFolder], Mapping[str, Any]] = read_small,
    roots: Iterable[Path] | None = None,
) -> Requirements:
    """What a policy in a folder or on the Hub needs, from its small files alone.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        read: reads these files, e.g. in another process.
        roots: as of `jaxmodels.load_policy`.

    Raises:
        HubError: the repo cannot be fetched.
        ConfigError: the config makes no sense.
        CheckpointError: files are missing or malformed. Weights are only looked for, so loading may still fail.
    """
    folder = Path(os.path.expanduser(path_or_repo))
    if str(path_or_repo) and folder.is_dir():
        if revision is not None:
            raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
        with PolicyFolder(folder, roots=roots) as opened:
            check_weights(opened, has_orbax=opened.has_tree())
            return _of(lerobot.described(read(opened)))
    # A cache of its own: half a policy in the usual one would pass for a whole policy when the Hub cannot be reached.
    with tempfile.TemporaryDirectory(prefix="robojax-description-") as cache:
        try:
            found = fetch(str(path_or_repo), revision, files=DESCRIBING, cache=Path(cache))
        except HubError:
            found = fetch(str(path_or_repo), revision, files=DESCRIBING)
        with PolicyFolder(found, roots=found.parents[1:2]) as opened:
            return _of(lerobot.described(read(opened)))


def _of(description: lerobot.Description) -> Requirements:
    """Of a policy that is still a stranger's: whether anything could compute it is asked, too."""
    config = description.config
    sizes: Sizes = policy_type(config.type).sizes(config)
    sizes.check()
    return requirements_of(description)


def requirements_of(description: lerobot.Description) -> Requirements:
    """The same in the words of whoever runs a robot."""
    config = description.config
    name = description.outside_name
    return Requirements(
        policy_type=config.type,
        cameras={camera_name(name(camera.name)): camera.shape[1:] for camera in config.cameras},
        state=None if config.state is None else config.state.shape[0],
        environment_state=None if config.environment_state is None else config.environment_state.shape[0],
        action=config.action.shape[0],
        chunk=config.chunk_size,
        action_steps=config.n_action_steps,
        joint_names=description.sidecar.joint_names,
        rate=description.sidecar.rate,
        temporal_ensemble_coeff=config.temporal_ensemble_coeff,
        takes_prefix=policy_type(config.type).takes_prefix,
        language=config.text_encoder is not None,
    )
