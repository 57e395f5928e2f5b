"""Gates of a quantized policy for the command `check`: its actions, and its success on the simulated arm."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from robojax.cli.app import Code, fail, print_table
from robojax.cli.recordings import source_or_end, warn_of_damage
from robojax.cli.sim import FIRST_SEED

if TYPE_CHECKING:
    from jaxmodels import ActionGate, Policy
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
        """Return the results for ``--json``."""
        success = {"not_run": self.success} if isinstance(self.success, str) else asdict(self.success)
        return {"passed": self.passed, "actions": asdict(self.actions), "success": success}


def measure_gates(policy: "Policy", reference: "Policy", recording: Path | None, episodes: int, limit: float) -> Gates:
    """Compare a quantized policy with a reference.

    Args:
        recording: recording or dataset with observations; seeded ones when None.
        episodes: of the simulated arm.
        limit: largest share of a joint's range.
    """
    import jaxmodels

    if recording is None:
        actions = jaxmodels.measure_action_gate(policy, reference, limit=limit)
    else:
        actions = _measure_recorded(policy, reference, recording, limit)
    return Gates(actions, _compare_success(policy, reference, episodes))


def _measure_recorded(policy: "Policy", reference: "Policy", recording: Path, limit: float) -> "ActionGate":
    source = source_or_end(recording)  # It ends the process without the packages that the next lines need.
    import jaxmodels
    from service.recording.replay import PolicyMismatch, read_observations
    from service.recording.steps import RecordingError

    stride = max(policy.requirements.action_steps, -(-(source.info.length or 0) // MAX_OBSERVATIONS))
    steps = read_observations(source, policy.requirements, stride)
    seen, named = (step for _, step in steps if step is not None), f"observations of {recording.name}"
    try:
        gate = jaxmodels.measure_action_gate(policy, reference, seen, limit=limit, source=named)
    except (PolicyMismatch, RecordingError) as error:
        fail(Code.USAGE, f"{recording} has no observations for this policy", str(error), "give another recording")
    warn_of_damage(source)
    return gate


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
    actions, success, verdicts = gates.actions, gates.success, ("failed", "passed")
    typer.echo(
        f"\ngate of actions: largest difference of {actions.dtype} from {actions.reference}, in the unit of the "
        f"policy's actions, over {actions.observations} {actions.source}:"
    )
    limit, numbers = f"{100 * actions.limit:g}", ("largest error", "% of range", "limit %")
    rows = [
        (each.joint, f"{each.error:.4f}", f"{100 * each.share:.3f}", limit, verdicts[each.share <= actions.limit])
        for each in actions.joints
    ]
    print_table(("joint", *numbers, "gate"), rows, numbers=numbers)
    if isinstance(success, str):
        typer.echo(f"gate of success: not run, because {success}")
        return
    typer.echo(
        f"gate of success: {verdicts[success.passed]}; {success.lifted} of {success.episodes} cubes lifted, "
        f"{success.reference_lifted} with {actions.reference} (p = {success.probability:.2f}, wanted 0.05 or more)"
    )
