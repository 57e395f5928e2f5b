"""What the demo asks a server for, and how a person would ask for the same."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

from service.demo.arm import CAMERA

SESSION = "demo-arm"


@dataclass(frozen=True)
class Request:
    """The body of the session's creation.

    Attributes:
        instruction: of the first episode; None for a policy that reads none.
    """

    url: str
    policy: str
    revision: str | None
    policy_type: str
    instruction: str | None = None
    is_recorded: bool = False

    def body(self) -> dict[str, Any]:
        """What is not the default is said."""
        said: dict[str, Any] = {
            "session_id": SESSION,
            "policy_path": self.policy,
            "transport_server_url": self.url,
            "camera_names": [CAMERA],
        }
        if self.revision is not None:
            said["revision"] = self.revision
        if self.policy_type != "act":
            said["policy_type"] = self.policy_type
        if self.instruction is not None:
            said["language_instruction"] = self.instruction
        return said | ({"record": True} if self.is_recorded else {})

    def curl(self) -> list[str]:
        """Lines a person can type to do what the demo did."""
        body = shlex.quote(json.dumps(self.body()))
        session, is_json = f"{self.url}/sessions/{SESSION}", "-H 'content-type: application/json' -d"
        other = shlex.quote(json.dumps({"language_instruction": self.instruction}))
        return [
            f"curl -X POST {self.url}/sessions {is_json} {body}",
            *([f"curl -X PATCH {session} {is_json} {other}"] if self.instruction is not None else []),
            f"curl -X POST {session}/start",
            f"curl {session}",
            f"curl -X POST {session}/stop",
        ]
