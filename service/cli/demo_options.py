"""Options that the commands about the simulated arm share."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.failure import Code, fail
from service.demo.tasks import Task, TaskName

FIRST_SEED = 5000  # demonstrations begin at 0: these cubes were never seen
DEMO = Path(__file__).parent.parent / "demo"

WhichTask = Annotated[
    TaskName, typer.Option("--task", help="pick: one red cube. two-cubes: a red and a blue one, asked for in turn.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the first episode; the next ones follow it.")]


def policy_of(task: Task, given: str | None) -> str:
    """A folder's whole path, a repo id as it is, or the policy that is shipped for the task; ends the command when
    there is none."""
    if given is not None:
        return str(Path(given).resolve()) if Path(given).exists() else given
    if task.policy is None:
        fail(
            Code.POLICY,
            "no policy to drive the arm with",
            f"none was given, and none is shipped for the task {task.name}",
            f"train one on what robojax record-demo data/{task.name} --task {task.name} records, and give its folder",
        )
    return str(DEMO / task.policy)
