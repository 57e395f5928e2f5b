"""Which flags ``robojax train`` knows, what they want, and what they do; LeRobot's names where LeRobot has them."""

from collections.abc import Iterable
from dataclasses import dataclass

POLICY_PREFIX = "policy."
WANTED = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "json": "JSON",
    "episodes": "numbers of episodes, e.g. [0,1,5] or 0-49",
    "size": "pixels, e.g. 96, or 96x128 (height x width)",
    "mesh": "how many devices, e.g. data:2,fsdp:4",
    "betas": "two numbers, e.g. 0.9,0.999",
}


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        group: its heading in the help.
        kind: one of `WANTED`.
    """

    name: str
    group: str
    kind: str
    help: str

    @property
    def wanted(self) -> str:
        return WANTED[self.kind]


def _flags(group: str, rows: Iterable[tuple[str, str, str]]) -> dict[str, Flag]:
    return {name: Flag(name, group, kind, text) for name, kind, text in rows}


FLAGS: dict[str, Flag] = {
    **_flags(
        "What is trained",
        (
            ("policy.type", "str", "act, diffusion2d or tokens2d; a new policy, made for the dataset"),
            ("policy.path", "str", "folder or Hub repo of a policy to go on with, instead of --policy.type"),
            ("policy.revision", "str", "branch, tag or commit of that repo"),
            ("policy.device", "str", "cpu, gpu, cuda, tpu, or one of them as cuda:1 [JAX's first choice]"),
            ("preset", "str", "small: what a CPU trains in minutes"),
            ("text_encoder", "str", "folder or Hub repo of a CLIP whose text tower reads instructions, as it is"),
            ("image_size", "size", "what the policy looks at, e.g. 96 or 96x128 [as the dataset's pictures]"),
        ),
    ),
    **_flags(
        "From what",
        (
            ("dataset.repo_id", "str", "dataset of the Hub (owner/name), or a name for that of --dataset.root"),
            ("dataset.root", "str", "folder of a LeRobotDataset, v3.0 or v2.1"),
            ("dataset.revision", "str", "branch, tag or commit of the repo"),
            ("dataset.episodes", "episodes", "some of its episodes, e.g. [0,1,5] or 0-49 [all]"),
            ("dataset.use_imagenet_stats", "bool", "normalise cameras by ImageNet's colours, as LeRobot [true]"),
            ("dataset.image_transforms.enable", "bool", "change pictures at random [false]"),
            ("dataset.image_transforms.max_num_transforms", "int", "changes of each picture [3]"),
            ("dataset.image_transforms.tfs", "json", "which changes, as LeRobot writes them [its six]"),
            ("dataset.image_transforms.noise", "float", "noise on each pixel, a share of the full range [0]"),
            ("state_noise", "float", "noise on the normalised state [0]"),
        ),
    ),
    **_flags(
        "How",
        (
            ("steps", "int", "updates of the parameters [100000]"),
            ("batch_size", "int", "examples of an update, over all devices together [8]"),
            ("seed", "int", "of first weights, order and noise [1000]"),
            ("dtype", "str", "float32, or bfloat16: computing, parameters stay float32 [float32]"),
            ("gradient_accumulation_steps", "int", "parts in which a batch is computed, for less memory [1]"),
            (
                "ema_decay",
                "float",
                "the policy becomes a moving average of the parameters, e.g. 0.999 [0: it does not]",
            ),
            ("use_policy_training_preset", "bool", "optimizer and scheduler as the policy's config asks [true]"),
            ("optimizer.type", "str", "adamw or adam"),
            ("optimizer.lr", "float", "learning rate"),
            ("optimizer.lr_backbone", "float", "that of vision backbones"),
            ("optimizer.weight_decay", "float", "weight decay"),
            ("optimizer.betas", "betas", "Adam's"),
            ("optimizer.eps", "float", "Adam's"),
            ("optimizer.grad_clip_norm", "float", "largest norm of a gradient; 0 does not clip"),
            ("optimizer.decayed", "str", "what decays: all, as in LeRobot, or matrices"),
            ("scheduler.type", "str", "constant, diffuser or cosine_decay_with_warmup"),
            ("scheduler.name", "str", "of a diffuser: cosine, linear, constant, constant_with_warmup"),
            ("scheduler.num_warmup_steps", "int", "steps in which the rate rises"),
            ("scheduler.num_decay_steps", "int", "of cosine_decay_with_warmup"),
            ("scheduler.peak_lr", "float", "of cosine_decay_with_warmup"),
            ("scheduler.decay_lr", "float", "of cosine_decay_with_warmup"),
        ),
    ),
    **_flags(
        "Where to, and what is told",
        (
            ("output_dir", "str", "folder of the run [outputs/train/<date>/<time>_<type>]"),
            ("resume", "bool", "go on with the run in --output_dir [false]"),
            ("job_name", "str", "instead of the type in the folder's name"),
            ("log_freq", "int", "steps between two lines of metrics [200]"),
            ("save_freq", "int", "steps between two checkpoints [20000]"),
            ("keep_checkpoints", "int", "how many of the newest stay [3]"),
            ("tensorboard", "bool", "write TensorBoard's events, too (extra `training`) [false]"),
            ("num_workers", "int", "threads that read and decode [4]"),
        ),
    ),
    **_flags(
        "On which devices",
        (
            ("mesh", "mesh", "devices for the batch and for the parameters, e.g. data:2,fsdp:4 [data: all]"),
            ("fsdp", "bool", "spread parameters over all devices (--mesh=data:1,fsdp:<all>) [false]"),
            ("distributed.coordinator_address", "str", "host:port of the first process"),
            ("distributed.num_processes", "int", "how many there are"),
            ("distributed.process_id", "int", "which one this is, from 0"),
            ("distributed.auto", "bool", "let JAX ask the cluster (Slurm, Kubernetes, TPU pods) instead [false]"),
        ),
    ),
}

# LeRobot's flags that mean nothing here, by name or by how their name begins: what to do instead.
ELSEWHERE = {
    "config_path": "give --output_dir and --resume=true",
    "wandb.": "Weights & Biases is not used; --tensorboard=true writes what TensorBoard reads",
    "env.": "nothing is evaluated while training; `robojax eval` does that",
    "eval.": "nothing is evaluated while training; `robojax eval` does that",
    "eval_freq": "nothing is evaluated while training; `robojax eval` does that",
    "peft.": "adapters are not trained here; all parameters are",
    "rename_map": "the policy is made for the dataset's names; `robojax serve` can rename",
    "tolerance_s": "frames are found by their number",
    "save_checkpoint": "checkpoints are always written; see --save_freq and --keep_checkpoints",
    "dataset.video_backend": "videos are read by PyAV",
    "dataset.streaming": "files are fetched before they are read",
    "use_rabc": "examples are not weighted",
}


def elsewhere(name: str) -> str | None:
    """What to do instead of a flag of LeRobot's that is none here."""
    for known, advice in ELSEWHERE.items():
        if name == known or (known.endswith(".") and name.startswith(known)):
            return advice
    return None
