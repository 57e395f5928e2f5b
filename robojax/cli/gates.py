"""Gates of a quantized policy for the command `check`: its actions, and its success on the simulated arm."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from robojax.cli.app import Code, fail, print_table
from robojax.cli.recordings import source_or_end, warn_of_damage
from robojax.cli.sim import FIRST_SEED

if TYPE_CHECKING:
    from jaxmodels import ActionGate, Policy, Requirements
    from robojax.sim.evaluation import SuccessGate

# Largest number of recorded observations, which are spread over the recording.
MAX_OBSERVATIONS = 200


@dataclass(frozen=True)
class Gates:
    """Results of both gates; `success` is the reason if the policy was not tried on the arm."""

    actions: "ActionGate"
    success: "SuccessGate | str"

    @property
    def passed(self) -> bool:
        return self.actions.passed and (isinstance(self.success, str) or self.success.passed)

    def as_json(self) -> dict[str, Any]:
        """Return the results for ``--json``; shares of joints' ranges in %."""
        actions = asdict(self.actions) | {"limit_percent": 100 * self.actions.limit, "passed": self.actions.passed}
        actions["joints"] = [
            {"joint": joint, "error": error, "percent": 100 * share, "passed": share <= self.actions.limit}
            for joint, error, share in self.actions.joints
        ]
        del actions["limit"]
        success = {"not_run": self.success} if isinstance(self.success, str) else asdict(self.success)
        return {"passed": self.passed, "actions": actions, "success": success}


def measure_gates(policy: "Policy", reference: "Policy", recording: Path | None, episodes: int, limit: float) -> Gates:
    """Compare a quantized policy with a reference.

    Args:
        recording: recording or dataset with observations; seeded ones when None. The result over recorded observations
            decides from now on whether the policy is served on this machine.
        episodes: of the simulated arm.
        limit: largest share of a joint's range.
    """
    import jaxmodels
    from service.recording.replay import PolicyMismatch
    from service.recording.steps import RecordingError

    try:
        if recording is None:
            actions = jaxmodels.measure_action_gate(policy, reference, limit=limit)
        else:
            seen, source = _read(recording, policy.requirements), f"observations of {recording.name}"
            actions = jaxmodels.measure_action_gate(policy, reference, seen, source=source, limit=limit)
    except (PolicyMismatch, RecordingError) as error:
        fail(Code.USAGE, f"{recording} has no observations for this policy", str(error), "give another recording")
    return Gates(actions, _compare_success(policy, reference, episodes))


def _read(recording: Path, requirements: "Requirements") -> Iterator[Mapping[str, Any]]:
    from service.recording.replay import read_observations

    source = source_or_end(recording)
    stride = max(requirements.action_steps, -(-(source.info.length or 0) // MAX_OBSERVATIONS))
    yield from (seen for _, seen in read_observations(source, requirements, stride) if seen is not None)
    warn_of_damage(source)


def _compare_success(policy: "Policy", reference: "Policy", episodes: int) -> "SuccessGate | str":
    from service.control.joints import SO100, have_same_joints

    needs, names = policy.requirements, [joint.name for joint in SO100]
    if not episodes:
        return "no episodes were asked for (--episodes)"
    if not have_same_joints(needs.joint_names or (), names) or set(needs.cameras) != {"front"} or needs.language:
        return "the policy is not for the simulated arm: an SO-100 with the camera front and without instructions"
    try:
        from robojax.sim.evaluation import compare_success

        return compare_success(policy, reference, range(FIRST_SEED, FIRST_SEED + episodes))
    except (ImportError, RuntimeError) as error:
        return f"the arm cannot be simulated here ({error}); pip install -e '.[sim]'"


def show_gates(gates: Gates) -> None:
    """Print both gates."""
    from rich.text import Text

    def verdict(passed: bool) -> Text:
        return Text("passed", "green") if passed else Text("failed", "bold red")

    actions, success = gates.actions, gates.success
    typer.echo(
        f"\ngate of actions: largest difference of {actions.dtype} from {actions.reference}, in the unit of the "
        f"policy's actions, over {actions.observations} {actions.source}:"
    )
    rows = [
        (joint, f"{error:.4f}", f"{100 * share:.3f}", f"{100 * actions.limit:g}", verdict(share <= actions.limit))
        for joint, error, share in actions.joints
    ]
    numbers = ("largest error", "% of range", "limit %")
    print_table(("joint", *numbers, "gate"), rows, numbers=numbers)
    if isinstance(success, str):
        typer.echo(f"gate of success: not run, because {success}")
    else:
        typer.echo(
            f"gate of success: {success.lifted} of {success.episodes} cubes lifted, {success.reference_lifted} with "
            f"{actions.reference}; as few by chance: {100 * success.probability:.0f} %, wanted 5 % or more: "
            f"{'passed' if success.passed else 'failed'}"
        )
