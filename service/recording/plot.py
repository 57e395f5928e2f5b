"""What was done and what a policy would have done, joint by joint, as a picture."""

from pathlib import Path

import numpy as np

from service.recording.open_loop import Report

WIDTH, ROW = 11.0, 1.7  # inches


def save_plot(path: Path, report: Report, title: str) -> None:
    """Draw it; the file's ending says the format.

    Raises:
        OSError: it cannot be written.
        ValueError: matplotlib does not know the format.
    """
    # Its own figure, not pyplot's: no window system is asked for anything.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    joints, rate = report.joints(), report.facts.rate
    figure = Figure(figsize=(WIDTH, ROW * len(joints) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(joints), 1, sharex=True, squeeze=False)[:, 0]
    ends = np.cumsum([len(episode.recorded) for episode in report.episodes])
    for number, (joint, axis) in enumerate(zip(joints, axes, strict=True)):
        start = 0
        for end, episode in zip(ends, report.episodes, strict=True):
            seconds = np.arange(start, end) / rate
            is_first = start == 0
            axis.plot(seconds, episode.recorded[:, number], color="C0", label="recorded" if is_first else None)
            axis.plot(seconds, episode.predicted[:, number], color="C1", lw=1, label="policy" if is_first else None)
            axis.plot(seconds[episode.asked], episode.predicted[episode.asked, number], ".", color="C1", ms=3)
            if end != ends[-1]:
                axis.axvline(end / rate, color="0.7", lw=0.8, ls="--")
            start = int(end)
        share = "" if joint.mean_percent is None else f" ({joint.mean_percent:.1f} %)"
        axis.set_ylabel(joint.name)
        axis.set_title(f"mean error {joint.mean:.2f}{share}, largest {joint.largest:.2f}", loc="right", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left", fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
