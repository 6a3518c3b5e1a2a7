"""Every config key with its type, default and meaning: for `fedfa config`, completion, editors and the docs."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedfa.experiment.config import Config

_BOUNDS = {annotated_types.Ge: ("ge", "≥"), annotated_types.Gt: ("gt", ">"), annotated_types.Le: ("le", "≤"),
           annotated_types.Lt: ("lt", "<")}  # fmt: skip


@dataclass(frozen=True)
class ConfigKey:
    """A config key with its type, default and meaning."""

    name: str
    kind: str
    """The type as text, with its bounds or choices."""
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    """The texts it may be, where these are all."""


def config_keys(kind: type[BaseModel] | None = None, prefix: str = "") -> list[ConfigKey]:
    """Every config key, except the options of components.

    Example:
        >>> [key.name for key in config_keys()][:3]
        ['rounds', 'seed', 'device']
        >>> {key.name: key.kind for key in config_keys()}["local.lr"]
        'float > 0'
    """
    keys: list[ConfigKey] = []
    for name, field in (kind or Config).model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += config_keys(inner, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        text = " ".join((field.description or "").replace("``", "").split())
        choices = tuple(one for one in get_args(inner) if isinstance(one, str)) if get_origin(inner) is Literal else ()
        keys.append(ConfigKey(f"{prefix}{name}", type_text(field), default, text, choices))
    return keys


def type_text(field: FieldInfo) -> str:
    """The type of a field as text, with its bounds.

    Example:
        >>> type_text(Config.model_fields["rounds"])
        'int ≥ 1'
    """
    bounds = [f"{sign} {getattr(one, name):g}" for one in field.metadata for kind, (name, sign) in _BOUNDS.items()
              if isinstance(one, kind)]  # fmt: skip
    return " ".join([_text(field.annotation), ", ".join(bounds)]).strip()


def _text(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts):
        return "text | table"
    if get_origin(annotation) in (dict, list, tuple):
        return "table" if get_origin(annotation) is dict else f"list of {_text(parts[0])}"
    if parts:
        return " | ".join(_text(part) for part in parts)
    return {"str": "text", "bool": "true | false"}.get(name := getattr(annotation, "__name__", str(annotation)), name)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors that check and complete TOML.

    Example:
        >>> json_schema()["properties"]["rounds"]["minimum"]
        1
    """
    schema = Config.model_json_schema(mode="validation")
    for section in (schema, *schema.get("$defs", {}).values()):
        for found in (section, *section.get("properties", {}).values()):
            if "description" in found:
                found["description"] = " ".join(found["description"].replace("``", "").split("\n\n")[0].split())
            found.pop("affects_result", None)
    partition = schema["$defs"]["DataConfig"]["properties"]["partition"]
    short = {"type": "string", "description": "Short form, e.g. shards:2 or dirichlet:0.1"}
    schema["$defs"]["DataConfig"]["properties"]["partition"] = {"anyOf": [short, partition]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fedfa configuration"}
