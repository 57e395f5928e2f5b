"""Actors that a cluster has one of, for all fronts: on its head, and found by a name."""

from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra

NAMESPACE = "robojax"

# On the cluster's head, whose end is the cluster's: no other machine that fails takes it along.
_ON_THE_HEAD = {"node:__internal_head__": 0.001}


def find_actor(name: str, kind: type, *arguments: Any, at_once: int | None = None, retries: int = 0) -> Any:
    """Ray's handle of the actor of this name in the cluster that this process is connected to; blocks.

    It is made if there is none, outlives whoever made it, and Ray starts it again where it ends.

    Args:
        kind, arguments: of which it is made.
        at_once: calls that it runs side by side; as Ray has it when None.
        retries: of a call in which it ended.
    """
    made: Any = ray.remote(kind)
    return made.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=_ON_THE_HEAD,
        max_restarts=-1,
        max_concurrency=at_once,
        max_task_retries=retries,
    ).remote(*arguments)
