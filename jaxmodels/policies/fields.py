"""Fields of a policy's config, from a ``config.json`` that was parsed already, and the way back."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jaxmodels.errors import ConfigError
from jaxmodels.features import dump_features, parse_features
from jaxmodels.text.config import TextConfig

FEATURES = ("input_features", "output_features")

_KINDS: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {
        "int": int,
        "bool": bool,
        "str": str,
        "float": (int, float),
        "str | None": (str, type(None)),
        "bool | None": (bool, type(None)),
        "float | None": (int, float, type(None)),
    }
)


def read_fields(cls: type[Any], values: Mapping[str, Any], what: str, advice: str) -> dict[str, Any]:
    """Arguments of a config's dataclass.

    Args:
        what: the config in errors, e.g. ``ACT config``.
        advice: what to say of fields that are not known.

    Raises:
        ConfigError: unknown fields, or values of other types.
    """
    known = {field.name: field for field in fields(cls)}
    # A field that is null and unknown is a newer LeRobot's that nobody set.
    values = {name: value for name, value in values.items() if name != "type" and (name in known or value is not None)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{what}: unknown fields {', '.join(unknown)}; {advice}")
    read = dict(values)
    for name in FEATURES:
        read[name] = parse_features(name, values.get(name))
    if "normalization_mapping" in values:
        mapping = values["normalization_mapping"]
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{what}: normalization_mapping is no object of type and mode")
        read["normalization_mapping"] = tuple((str(kind), str(mode)) for kind, mode in mapping.items())
    if values.get("tags") is not None:
        read["tags"] = tuple(str(tag) for tag in values["tags"])
    if values.get("text_encoder") is not None:
        read["text_encoder"] = TextConfig.from_json(values["text_encoder"])
    return {name: _typed(what, name, str(known[name].type), value) for name, value in read.items()}


def dump_fields(config: Any) -> dict[str, Any]:
    """The fields as LeRobot writes them, ``type`` first."""
    values: dict[str, Any] = {"type": config.type}
    values |= {field.name: getattr(config, field.name) for field in fields(config)}
    for name in FEATURES:
        values[name] = dump_features(values[name])
    values["normalization_mapping"] = dict(config.normalization_mapping)
    if values.get("tags") is not None:
        values["tags"] = list(values["tags"])
    if values.get("text_encoder") is not None:
        values["text_encoder"] = values["text_encoder"].to_json()
    return values


def _typed(what: str, name: str, declared: str, value: Any) -> Any:
    """Checks a JSON value against the declared type of its field."""
    declared = declared.removeprefix("<class '").removesuffix("'>")
    kind = _KINDS.get(declared)
    if kind is None:
        return value
    is_number_flag = isinstance(value, bool) and kind not in (bool, (bool, type(None)))
    if is_number_flag or not isinstance(value, kind):
        raise ConfigError(f"{what}: {name} is {value!r}; wanted {declared}")
    return float(value) if declared.startswith("float") and value is not None else value
