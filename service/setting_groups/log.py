"""What is logged, where, and how much of it is kept."""

from typing import Literal

from pydantic import Field

from service.setting_groups.group import Group


class LogSettings(Group):
    """Log"""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object per line."
    )
    log_file: str | None = Field(default=None, description="File that is logged to besides standard error.")
    log_file_bytes: int = Field(
        default=10 << 20, ge=10_000, description="Bytes after which the log file is set aside and a new one begun."
    )
    log_files: int = Field(default=5, ge=1, le=1000, description="Log files kept; the oldest goes.")
    log_lines: int = Field(default=500, ge=1, le=100_000, description="Lines kept for GET /debug/logs.")
