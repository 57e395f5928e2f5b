"""A folder with the files of a policy; what is in them nobody loads."""

from pathlib import Path

FILES = {"config.json": b'{"type": "act"}', "model.safetensors": bytes(range(256)) * 8}


def write(folder: Path) -> Path:
    """`FILES` in a new folder."""
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """What a folder has, to compare with `FILES`."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
