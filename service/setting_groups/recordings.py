"""Where sessions are recorded, and how much room that may take."""

from pydantic import Field

from service.setting_groups.group import Group


class RecordingSettings(Group):
    """Recordings"""

    recordings: str | None = Field(
        default=None, description="Folder that recordings of sessions go to; default: recordings in the state folder."
    )
    recording_free: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that stay free: a recording ends before. Default: 1 GiB, or 5 % of a small disk.",
    )
    recording_limit: int = Field(default=20 << 30, ge=1 << 20, description="Bytes of one recording.")
    recording_datasets: bool = Field(
        default=True, description="Make a LeRobotDataset of every recording when it has ended."
    )
