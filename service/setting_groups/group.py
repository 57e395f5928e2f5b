"""What all groups of settings have in common: one prefix, and values from `load_settings` alone."""

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX = "ROBOJAX_"


class SettingsError(Exception):
    """Settings that cannot be used; the text names each setting, its source, what was found and what was wanted."""


class Group(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Only what `load_settings` gathered, and what tests give: it knows where each value came from.
        return (init_settings,)
