"""``robojax`` without a limit on missed commands during probation, because other processes share the machine:
``python -m tests.testing.lenient_probation serve``. The caller counts the missed commands itself."""

from functools import partial

from robojax.cli.app import main
from service.rollout import webhooks
from service.rollout.gates import ProbationSettings

if __name__ == "__main__":
    webhooks.ProbationSettings = partial(  # type: ignore[misc]
        ProbationSettings, missed=1e9, starvations=1_000_000, max_still=1e9
    )
    main()
