"""A folder with the files of a policy; what is in them nobody loads."""

from pathlib import Path

FILES = {
    "config.json": b'{"type": "act"}',
    "model.safetensors": bytes(range(256)) * 8,
    "owner/vlm/tokenizer.json": b"{}",
}


def write(folder: Path) -> Path:
    """`FILES` in a new folder."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """What a folder has, to compare with `FILES`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
