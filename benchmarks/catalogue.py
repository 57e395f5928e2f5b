"""All benchmarks: the question of each, how to run it briefly or fully, and how to read what it found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import answers

FOLDER = Path(__file__).parent
LEROBOT, OPENPI = "--lerobot-python", "--openpi-python"


@dataclass(frozen=True)
class Benchmark:
    """One file of this folder.

    Attributes:
        name: of the script and of its results.
        question: as a user asks it.
        reading: what the figures mean, for somebody who has not seen them before.
        minutes: that it takes about, fully and briefly.
        quick: its arguments for a brief run; without any it is left out of those.
        full: its arguments else.
        answer: a sentence from its results.
        takes: the flag for a Python with a peer in it, which it can be given.
        is_peerless: whether it has something to measure without that peer.
    """

    name: str
    question: str
    reading: str
    minutes: tuple[float, float]
    answer: Callable[[Mapping[str, Any]], str] = lambda found: ""
    quick: Sequence[str] | None = None
    full: Sequence[str] = ()
    takes: str | None = None
    is_peerless: bool = True

    @property
    def script(self) -> Path:
        return FOLDER / f"{self.name}.py"

    def answered(self, found: Mapping[str, Any]) -> str:
        """The answer; nothing when the results are of another shape than it knows."""
        try:
            return self.answer(found)
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
            return ""


ALL: Sequence[Benchmark] = (
    Benchmark(
        "glass_to_action",
        "How long from light to motion?",
        "From a picture being taken to the first command that used it, stage by stage. 'event to motion' is what a "
        "person sees: from something that happens at a random moment to the first command that can know of it; it adds "
        "the wait for the next question to the policy.",
        (3.5, 1.5),
        answers.glass,
        ("--seconds", "5"),
    ),
    Benchmark(
        "control_jitter",
        "How late is a tick while policies compute?",
        "Lateness from a tick's deadline to its code running, beside bare loops that do nothing but send. Above 5 ms "
        "for the bare loops, the machine was busy with other things, and only the ratio means anything.",
        (3, 0.7),
        answers.jitter,
        ("--rounds", "2"),
    ),
    Benchmark(
        "robots_per_device",
        "How many robots on this machine, and where does it break?",
        "Robots whose policies run on one device: how many keep their rate without a miss, one at a time and batched, "
        "and how long an answer takes as their number grows.",
        (5, 1),
        answers.robots,
        quick=("--quick",),
    ),
    Benchmark(
        "fleet_sim",
        "How many machines do 10 to 100,000 robots need?",
        "A simulation, fed by what robots_per_device measured here: machines of this kind that fleets need, how late "
        "their chunks are, and how long robots are held when one machine in a hundred fails.",
        (4, 0.5),
        answers.fleets,
        quick=("--most", "1000", "--seconds", "5"),
    ),
    Benchmark(
        "ray_latency",
        "What does an engine in another process cost, per chunk?",
        "The same policy in this process and in an engine of a Ray on this machine, by turns; 'added' is the way there "
        "and back.",
        (1.5, 0.7),
        answers.ray_latency,
        ("--rounds", "1", "--count", "40"),
    ),
    Benchmark(
        "ray_serve",
        "Would Ray Serve be the better pool of engines?",
        "Calls to an actor and through Serve's handle, by turns, and the time until a second engine answers when the "
        "first one has too much to do: our pool and Serve's autoscaler. Needs ray[serve].",
        (5, 0.5),
        answers.ray_serve,
        ("--rounds", "2", "--count", "30", "--grow-rounds", "0"),
    ),
    Benchmark(
        "ray_cluster",
        "What do robots see when a machine or a front of a cluster dies?",
        "Three nodes of Ray on this machine, two fronts, sixteen robots: the longest pause between two commands of a "
        "robot, and what became of sessions.",
        (3.5, 1.5),
        answers.ray_cluster,
        ("--only", "failures", "--seconds", "5"),
    ),
    Benchmark(
        "isolation",
        "Does one failing session disturb the others?",
        "Lateness of seven sessions while an eighth raises, answers with NaN or stalls; 1.0 means unchanged.",
        (4, 1),
        answers.isolation,
        quick=("--quick",),
    ),
    Benchmark(
        "smoothness",
        "How smooth is the motion when chunks come late?",
        "Cubes lifted and mean jerk of the demo's arm by how chunks are joined and how late they come. In virtual "
        "time: other work on the machine changes nothing.",
        (5, 1),
        answers.smooth,
        ("--episodes", "2", "--delay", "0", "--delay", "200"),
    ),
    Benchmark(
        "real_time_chunking",
        "Does a chunk continue the plan that is being executed?",
        "Jumps between two chunks of a policy with an iterative sampler, by what is done about them and by delay.",
        (1, 0.5),
        answers.seams,
        quick=("--episodes", "64"),
    ),
    Benchmark(
        "vs_peers",
        "How much faster than the peers?",
        "One observation to its chunk, by each project's own server and client, and without any. A ratio of 2 means "
        "that the peer takes twice as long in the same run.",
        (5, 2.5),
        answers.peers,
        ("--rounds", "2", "--count", "2"),
        takes=LEROBOT,
    ),
    Benchmark(
        "transport_overhead",
        "What does the server itself cost, per request?",
        "A policy that computes nothing behind our server and openpi's: what is left is the transport.",
        (3, 1),
        answers.transport,
        ("--rounds", "2", "--count", "30"),
        takes=OPENPI,
        is_peerless=False,
    ),
    Benchmark(
        "cold_start",
        "How long until it is ready?",
        "Seconds since the process was started. 'first' compiles, 'again' finds on disk what was compiled before.",
        (5, 1.5),
        answers.start,
        ("--rounds", "1"),
        takes=LEROBOT,
    ),
    Benchmark(
        "act_latency",
        "How long does ACT of LeRobot's size take?",
        "From NumPy frames to NumPy actions, batch 1, beside LeRobot's own in torch over the same files.",
        (4, 1),
        answers.act,
        ("--rounds", "2", "--count", "3", "--case", "2 cameras 224x224"),
        takes=LEROBOT,
    ),
    Benchmark(
        "vla_latency",
        "How long do SmolVLA and Diffusion Policy take?",
        "From NumPy frames to NumPy actions, batch 1, beside LeRobot 0.6.1 in torch over the same files; memory of "
        "loading over the size of the weights; and SmolVLA of a quarter of its width for eight robots at once.",
        (8, 3),
        answers.vla,
        ("--rounds", "1", "--count", "1", "--case", "smolvla"),
        ("--batching",),
        takes=LEROBOT,
    ),
    Benchmark(
        "vla_gpu",
        "How long do pi0.5, SmolVLA and ACT take on a GPU?",
        "From NumPy frames of three cameras to NumPy actions, in bfloat16, one robot and four together, beside LeRobot "
        "0.6.1 in torch. Without a GPU nothing is measured.",
        (8, 1),
        answers.gpu,
        full=("--golden",),
        takes=LEROBOT,
    ),
    Benchmark(
        "load",
        "Are the server's times kept under load?",
        "Rows L1 to L9, each with its target and, where it is about lateness, bare loops beside it. A row that misses "
        "its target passes when bare loops miss it too and are at most 1.5 times better.",
        (4.5, 1),
        answers.load,
        ("--only", "L1,L7", "--sessions", "8", "--seconds", "10"),
    ),
    Benchmark(
        "policy_swap",
        "Does swapping a policy cost a running robot ticks?",
        "Rounds in which policies are loaded, judged and swapped, and rounds in which nothing is.",
        (2, 0.7),
        answers.swap,
        ("--rounds", "1"),
    ),
    Benchmark(
        "webhook_receive",
        "Do slow webhook handlers keep others waiting?",
        "Milliseconds that an unrelated request waits while three handlers are slow.",
        (1.5, 0.4),
        answers.webhooks,
        ("--rounds", "1"),
    ),
    Benchmark(
        "page",
        "What does the page cost the robots?",
        "Lateness of ticks with nobody looking on, and with two pages that draw plots and pictures.",
        (1.2, 1.2),
        answers.page,
    ),
    Benchmark(
        "transformer2d_latency",
        "How long does a forward pass of the 2D transformer take?",
        "Beside diffusers' own in torch, eager and compiled, over the same files.",
        (4.5, 1),
        answers.transformer,
        ("--rounds", "2", "--seconds", "1", "--case", "DiT-S/2, 32x32x4, batch 1"),
        ("--compiled-peer",),
    ),
    Benchmark(
        "transformer2d_compile",
        "Does a deep transformer compile about as fast as a shallow one?",
        "28 layers against 2: above 2 times the target is missed.",
        (2, 0.6),
        answers.compile,
        ("--rounds", "1"),
    ),
    Benchmark(
        "data_loader",
        "How many images a second does a dataset give to training?",
        "Shuffled batches of two cameras of 480x640, beside LeRobot's loader in the same run on the same files. A "
        "ratio of 2 means twice as many as LeRobot's. The target is 1.5.",
        (3, 1),
        answers.data,
        ("--rounds", "2", "--batches", "12", "--episodes", "3"),
        takes=LEROBOT,
    ),
    Benchmark(
        "demo_with_faults",
        "Does the arm hold and go on when something breaks?",
        "Twenty cubes of the demo; while it lifts each, a camera stalls, or the rooms' server or its gateway dies.",
        (5, 1),
        answers.faults,
        ("--episodes", "3"),
    ),
    Benchmark(
        "crash_recovery",
        "Is anything lost when the server is killed?",
        "Every figure but those of acknowledged requests should be 0.",
        (4, 0.7),
        answers.kills,
        ("--kills", "10"),
    ),
    Benchmark(
        "session_cycles",
        "Does a server that makes and deletes sessions all day grow?",
        "What the server holds after a thousand lives of a session, against what it held after a hundred.",
        (4, 1),
        answers.cycles,
        ("--cycles", "200"),
    ),
    Benchmark(
        "hostile_requests",
        "What do ten thousand malformed requests do?",
        "Answers of 500 and above, tracebacks and missed ticks should be 0; memory should not grow.",
        (2, 1),
        answers.hostile,
        ("--requests", "1000"),
    ),
    Benchmark(
        "floods",
        "Does a robot notice sixty clients that send as fast as they can?",
        "Commands late by more than a period should be 0 beside every kind of flood, and a stop take less than 100 ms.",
        (3, 1.5),
        answers.floods,
        ("--seconds", "2"),
    ),
)


def wanted(names: Sequence[str]) -> Sequence[Benchmark]:
    """Those whose scripts are here, all or by name, in this order.

    Raises:
        KeyError: names that are none of theirs.
    """
    here = [one for one in ALL if one.script.is_file()]
    unknown = set(names) - {one.name for one in here}
    if unknown:
        raise KeyError(", ".join(sorted(unknown)))
    return [one for one in here if not names or one.name in names]
