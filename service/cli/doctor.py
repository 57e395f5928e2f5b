"""``robojax doctor``: is this machine fit?"""

from typing import Annotated

import typer

from service.cli.findings import show_findings


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Look at this port, not at the settings'.")] = None,
) -> None:
    """Look at Python, JAX's devices, rendering, video, the port, keys, disk and caches; each finding has its fix.

    Exit code 1 when something is missing that the server needs.
    """
    from service.cli.serve import settings_or_end
    from service.diagnosis import diagnose
    from service.state import usual_state

    settings = settings_or_end({"port": port})
    if settings.state is None:
        settings = settings.model_copy(update={"state": usual_state(settings.port)})
    show_findings(diagnose(settings), as_json=as_json)
