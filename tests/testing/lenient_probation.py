"""``robojax``, but what another user of the machine makes a robot miss is not held against a policy on its probation:
``python -m tests.testing.lenient_probation serve``. Who starts it counts what was missed."""

from functools import partial

from robojax.cli.app import main
from service.rollout import webhooks
from service.rollout.gates import ProbationSettings

if __name__ == "__main__":
    webhooks.ProbationSettings = partial(ProbationSettings, missed=1e9, starvations=1_000_000, max_still=1e9)  # type: ignore[misc]
    main()
