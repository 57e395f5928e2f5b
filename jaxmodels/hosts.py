"""Several processes as one computer: a policy is then spread over the devices of all of them.

Each runs the same programs in the same order (JAX calls it multi-controller); who says which, and brings inputs to all
of them, is not of this package. The connections between the processes are JAX's own.
"""

import jax

from jaxmodels.errors import ConfigError
from jaxmodels.placement import HOSTS


def join_hosts(
    count: int, number: int | None = None, coordinator: str | None = None, *, patience: float = 300.0
) -> tuple[str, int]:
    """Make this process one of several; before anything else is asked of JAX. Waits for the others.

    Args:
        count: of processes.
        number: of this one, from 0; None where JAX finds out by itself who is there (TPU pods, Slurm, Open MPI).
        coordinator: ``address:port`` of the process with the number 0, as all reach it; None likewise.
        patience: seconds that the others are waited for.

    Returns:
        The place of all their devices, as `load_policy` takes it for a device, and how many these are.

    Raises:
        ConfigError: JAX had begun before, or the others did not come, or are not as many.
    """
    # Otherwise JAX ends this process when another one is gone, and takes SIGTERM for itself.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if coordinator is None:
            jax.distributed.initialize(initialization_timeout=int(patience))
        else:
            jax.distributed.initialize(
                coordinator,
                count,
                number,
                cluster_detection_method="deactivate",
                initialization_timeout=int(patience),
                # Its usual one is every address of the machine, and it asks nobody for a key.
                coordinator_bind_address=coordinator if number == 0 else None,
            )
        devices = jax.devices()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the hosts cannot be joined: {str(error)[:300]}") from error
    if jax.process_count() != count:
        raise ConfigError(f"JAX found {jax.process_count()} processes; wanted {count}")
    return HOSTS, len(devices)
