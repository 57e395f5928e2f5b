"""Command `export`: writes a policy as a bundle for one platform."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from robojax.cli.app import DTYPE_HELP, LEROBOT_HELP, RENAME_HELP, Code, fail, print_facts, read_rename


def export(
    policy: Annotated[str, typer.Argument(help="Policy folder, or Hub repo id (owner/name)")],
    target: Annotated[
        Literal["cpu", "cuda", "rocm", "tpu"], typer.Option("--for", help="Platform that will run the policy")
    ],
    output: Annotated[
        Path | None, typer.Option(help="New folder of the bundle; default: the policy's name and the platform")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes to compile, as 1,4,16")] = "1",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo")] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    action_error_percent: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Largest error of a quantized policy's actions, in % of a range")
    ] = 0.5,
    rename: Annotated[list[str] | None, typer.Option(help=RENAME_HELP)] = None,
    lerobot_version: Annotated[Literal["0.4", "0.6"] | None, typer.Option(help=LEROBOT_HELP)] = None,
) -> None:
    """Write a policy as a bundle that a server starts faster: weights as served, StableHLO and executables.

    Executables are compiled only on a machine with such a device. A server uses the executables of its own user's
    bundles, and of bundles whose digest is in the setting trusted_bundles.

    Exit code 2 for a wrong option, 3 if the policy cannot be loaded or exported.
    """
    from rich.console import Console

    import jaxmodels
    from jaxmodels.errors import JaxModelsError

    sizes = _read_batch_sizes(batch)
    source = Path(policy).resolve() if Path(policy).is_dir() else Path(policy)
    options: dict[str, Any] = {"revision": revision, "dtype": dtype, "rename": read_rename(rename)}
    try:
        with Console(stderr=True, highlight=False).status("loading the policy ...") as status:
            written = jaxmodels.export_policy(
                policy,
                output or f"{source.name}-{target}",
                target,
                batch_sizes=sizes,
                lerobot=lerobot_version,
                action_error=action_error_percent / 100,
                on_progress=lambda step: status.update(f"{step} ..."),
                **options,
            )
    except (JaxModelsError, OSError) as error:
        then = "robojax check shows whether the policy can be loaded; --output names a new folder on a disk with space"
        fail(Code.POLICY, f"{policy} cannot be exported", str(error), then)
    manifest = written.manifest
    print_facts(
        [
            ("bundle", str(written.folder)),
            ("dtype", manifest.dtype),
            ("batch sizes", ", ".join(map(str, manifest.batch_sizes))),
            ("executables", f"{manifest.device}, jaxlib {manifest.jaxlib}" if manifest.device else _WITHOUT_DEVICE),
            ("digest", written.digest),
        ]
    )


_WITHOUT_DEVICE = "none: this machine has no such device; a server compiles at its first start"


def _read_batch_sizes(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 0 < int(size) <= 1024 for size in sizes):
        fail(
            Code.USAGE, f"--batch is {text!r}", "wanted numbers of 1 to 1024, separated by commas", "try --batch 1,4,16"
        )
    return tuple(sorted({int(size) for size in sizes}))
