"""Dataclasses that are read from YAML sections: types and ranges checked on construction."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ep_dispatcher.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def number(default: Any, low: float = 1, high: float | None = None) -> Any:  # noqa: ANN401
    """Declare a field that holds a number in [low, high]; `default` may be None."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def choice(default: str, *others: str) -> Any:  # noqa: ANN401
    """Declare a field that holds one of a few words."""
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the sections: every field is checked against its type, range or choices.

    Raises:
        ConfigError: names section, key, value and what is allowed.
    """

    def __post_init__(self) -> None:
        """Check each field on its own."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            where = f"{self.name()}.{field.name}"
            value = getattr(self, field.name)
            _check_type(where, value, hints[field.name])
            if value is not None:
                _check_range(where, value, field.metadata)

    @classmethod
    def name(cls) -> str:
        """Name of the section in a config file."""
        return cls.__name__.removesuffix("Section").lower()

    @classmethod
    def from_mapping(cls, values: object) -> Self:
        """Build from a section's plain values; None or nothing gives the defaults.

        Raises:
            ConfigError: not a mapping, or an unknown key; names it and the known ones.
        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping):
            raise ConfigError(f"section {cls.name()!r} holds {values!r}; it needs keys and values")
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(cls.name(), values, known)
        return cls(**values)


def refuse_unknown(section: str, values: Mapping[Any, Any], known: list[str]) -> None:
    """Raise ConfigError if a mapping has a key that nobody reads."""
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r} in section {section!r}; known keys: {', '.join(known)}"
        )


def _check_type(where: str, value: object, hint: object) -> None:
    """Raise unless a value is of an annotated type; whole numbers pass as numbers."""
    union = isinstance(hint, types.UnionType)
    allowed = typing.get_args(hint) if union else (hint,)
    if value is None and type(None) in allowed:
        return
    kind = next(each for each in allowed if each is not type(None))
    fits = isinstance(value, int | float if kind is float else kind)
    if fits and not (isinstance(value, bool) and kind is not bool):
        return
    wanted = _WORDS.get(kind, str(kind)) + (" or null" if type(None) in allowed else "")
    hint_text = ""
    if kind is float and isinstance(value, str):
        hint_text = "; YAML reads 1e-3 as text, so write 0.001 or 1.0e-3"
    raise ConfigError(f"{where} is {value!r}; it must be {wanted}{hint_text}")


def _check_range(where: str, value: Any, metadata: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Raise unless a value lies in the range, or among the choices, that its field declares."""
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(choices)}")
    low, high = metadata.get("low"), metadata.get("high")
    too_low = low is not None and not value >= low  # NaN is in no range
    if too_low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{where} is {value}; it must be {allowed}")
