"""What the demo shows in the terminal, out of one view."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from service.demo.show import View


def facts(view: "View") -> list[tuple[str, str]]:
    """Name and text of every figure, in order."""
    status = view.status
    stats: dict[str, Any] = status["stats"]
    inference: dict[str, Any] = status.get("inference_stats") or {}
    stages = inference.get("stages_ms", {})
    lateness = stats.get("tick_lateness_ms", {})
    why = f" ({stats['hold']})" if stats.get("hold") else ""
    rows = [
        ("session", f"{status['session_id']}: {status['status']}{why}"),
        ("camera fps", ", ".join(f"{name} {_number(fps)}" for name, fps in stats.get("camera_fps", {}).items())),
        ("inference ms", f"{_pair(stages.get('total', {}))}, {inference.get('inference_count', 0)} chunks"),
        ("tick late ms", f"{_pair(lateness)} at {_number(stats.get('rate'))} Hz"),
        ("commands", f"{stats.get('commands_sent', 0)} sent, {stats.get('late_actions_dropped', 0)} late ones dropped"),
    ]
    if status.get("error_message"):
        rows.append(("error", str(status["error_message"])))
    return rows


def table(view: "View", episodes: int) -> Table:
    """The live table."""
    title = f"robojax demo: a policy of type {view.status['policy_type']} picks up cubes"
    shown = Table(title=title, title_justify="left", show_header=False)
    shown.add_column(style="bold")
    shown.add_column(min_width=64)
    ahead = f"{episodes - view.score.done} to go" if episodes else "Ctrl-C ends it"
    shown.add_row("cubes", f"{view.score}, {ahead}")
    if view.asked:
        shown.add_row("asked", view.asked)
    for name, value in facts(view):
        shown.add_row(name, value)
    joints: dict[str, Any] = view.status["stats"].get("measured_joints") or {}
    targets: dict[str, Any] = view.status["stats"].get("last_command") or {}
    for name, value in joints.items():
        shown.add_row(name, f"{_number(value):>7} -> {_number(targets.get(name)):>7}  {_bar(name, value)}")
    return shown


def _pair(figures: dict[str, Any]) -> str:
    return f"p50 {_number(figures.get('p50'))}, p99 {_number(figures.get('p99'))}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


def _bar(name: str, value: Any, width: int = 30) -> str:
    """Where the joint is in its range."""
    if value is None:
        return ""
    low = 0.0 if name == "Jaw" else -100.0
    place = round((min(max(value, low), 100.0) - low) / (100.0 - low) * (width - 1))
    return "·" * place + "●" + "·" * (width - 1 - place)
