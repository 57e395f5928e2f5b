"""``python -m tests.hostile.pushed_server serve ...``: the scripted server, where a push replaces ``config.json``."""

from functools import partial
from typing import Any

import service.app
from robojax.cli.app import main
from service.rollout import webhooks
from service.rollout.gates import ProbationSettings
from tests.faults import script


class PushedPolicy(script.FollowedPolicy):
    """Policy that keeps the script that was in its folder when it was loaded."""

    def _look(self) -> dict[str, Any]:
        return self._order or super()._look()


if __name__ == "__main__":
    script.FollowedPolicy = PushedPolicy  # type: ignore[misc]
    script.FILE = "config.json"
    webhooks.FOLDER_POLL_INTERVAL = 0.1
    webhooks.ProbationSettings = partial(ProbationSettings, missed=1e9)  # type: ignore[misc]
    service.app.create_app = partial(service.app.create_app, load=script.load, read_requirements=script.read)
    main()
