"""Policy ``robojax``: a session of a robojax server computes the actions."""

import atexit
from collections import deque
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import torch
from lerobot.policies import PreTrainedPolicy
from lerobot.utils.constants import OBS_IMAGE, OBS_STATE

from lerobot_policy_robojax.configuration_robojax import RobojaxConfig
from robojax.client import Chunk, Client

LOADED = 600.0  # seconds in which the server downloads and reads a policy


class RobojaxPolicy(PreTrainedPolicy):
    """Policy of one robot, with a session of its own, which is removed at the end of the program.

    Raises:
        ValueError: the configuration has no names of joints.
        RobojaxError: the server refuses the session, with the server's text, or cannot be reached.
    """

    config_class = RobojaxConfig
    name = "robojax"

    def __init__(self, config: RobojaxConfig, **_: Any):
        super().__init__(config)
        if not config.joint_names:
            raise ValueError("joint_names is empty; give --policy.joint_names=[...] in the order of the robot's action")
        self._queue: deque[torch.Tensor] = deque()
        self.reset()
        stack = ExitStack()
        atexit.register(stack.close)
        client = stack.enter_context(Client(config.server))
        policy = {"policy_path": config.policy_path, "joint_names": config.joint_names}
        cameras = client.request("POST", "/policies/check", policy, timeout=LOADED)["camera_names"]
        session_id = config.session or f"lerobot-{uuid4().hex[:8]}"
        session = client.create(session_id, **policy, camera_names=cameras, rate=config.fps)
        stack.callback(session.delete)
        self._stream = stack.enter_context(session.stream())

    @classmethod
    def from_pretrained(cls, *_: Any, config: RobojaxConfig, **__: Any) -> "RobojaxPolicy":
        """Return the policy of a configuration; nothing is loaded, because the weights are on the server."""
        return cls(config)

    def forward(self, *_: Any) -> Any:
        """Refuse to train."""
        raise NotImplementedError("the policy runs on a robojax server and cannot be trained here")

    get_optim_params = forward

    def reset(self) -> None:
        """Begin an episode: the rest of the chunk is dropped, here and on the server."""
        self.drop_queued_actions()
        self._is_new, self._executed = True, None

    def drop_queued_actions(self) -> None:
        """Drop the rest of the chunk, so that the next action is the first action of a new chunk."""
        self._queue.clear()

    def select_action(self, batch: dict[str, Any], **_: Any) -> torch.Tensor:
        """Return the next action (1, a); a request is sent when all actions of a chunk are executed."""
        if not self._queue:
            chunk = self._request_chunk(batch)
            self._queue.extend(self._to_tensor(chunk.actions[: chunk.action_steps]))
            self._executed = 0
        self._executed += 1
        return self._queue.popleft()[None]

    def predict_action_chunk(self, batch: dict[str, Any], **_: Any) -> torch.Tensor:
        """Return the server's chunk (1, t, a) for one observation, in the robot's units."""
        return self._to_tensor(self._request_chunk(batch).actions)[None]

    def _to_tensor(self, actions: Any) -> torch.Tensor:
        return torch.tensor(actions, device=self.config.device)

    def _request_chunk(self, batch: dict[str, Any]) -> Chunk:
        state, task, fps = batch[OBS_STATE], batch.get("task"), self.config.fps
        if len(state) != 1:
            raise ValueError(
                f"the batch has {len(state)} observations; the policy takes one robot: --eval.batch_size=1"
            )
        images = {
            key.rpartition(".")[2]: (value[0] * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
            for key, value in batch.items()
            if key.startswith(OBS_IMAGE)
        }
        prompt = task[0] if isinstance(task, list) else task
        fields = {"prompt": prompt or None, "reset": self._is_new or None, "executed": self._executed}
        chunk = self._stream.act(images, state[0].float().cpu().numpy(), **fields)
        if fps not in (None, chunk.action_rate):
            raise ValueError(f"fps is {fps:g}, but the policy's rate is {chunk.action_rate:g}; use this rate")
        self._is_new = False
        return chunk
