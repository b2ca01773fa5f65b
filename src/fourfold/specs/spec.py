"""The base of every spec: frozen, closed to unknown keys, and its mistakes are ``UserError``s."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from fourfold.errors import UserError, choices, nearest

# pydantic's error type -> what the value must be.
KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}

# Divisors are only for advice in messages: looking for them must not take longer than the eye notices.
_LARGEST_TRIED = 2**20


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """Return the message for a key that does not exist, with the valid ones."""
    names = sorted(valid)
    return f"{key} is not a key here.{nearest(key, names)} Valid: {', '.join(names)}"


def _problems(error: Any, spec: type[BaseModel]) -> list[str]:
    """Translate one of pydantic's errors into our own words."""
    if error["type"] == "value_error":  # one of our own, in its own words
        return str(error["ctx"]["error"]).splitlines()
    return [_problem(error, spec)]


def _problem(error: Any, spec: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    kind, limits = error["type"], error.get("ctx", {})
    given = f"{path}={error['input']!r}"
    if kind == "missing":
        field = spec.model_fields.get(path)
        meaning = f" ({field.description})" if field and field.description else ""
        return f"{path} is missing{meaning}: give it a value"
    if kind == "extra_forbidden":
        return unknown_key(path, spec.model_fields)
    if kind == "greater_than":
        return f"{given} is too small: use more than {limits['gt']}"
    if kind == "greater_than_equal":
        return f"{given} is too small: use {limits['ge']} or more"
    if kind == "less_than":
        return f"{given} is too large: use less than {limits['lt']}"
    if kind == "less_than_equal":
        return f"{given} is too large: use {limits['le']} or less"
    if kind == "literal_error":
        return f"{given} is not a choice: use {limits['expected']}"
    if kind in KINDS:
        return f"{given} must be {KINDS[kind]}"
    return f"{given}: {error['msg']}"


class Spec(BaseModel):
    """A frozen set of named values. A wrong one raises ``UserError`` with every problem at once.

    Each message starts with the name of the field, so that the message of a nested spec becomes the message
    of the outer one by a prefix.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the values with derived defaults filled in, and the problems that were found on the way."""
        return values, []

    def inconsistencies(self) -> list[str]:
        """Return the problems between fields that are each valid alone."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _raise_user_errors(cls, data: Any, handler: ModelWrapValidatorHandler["Spec"]) -> "Spec":
        if not isinstance(data, Mapping):
            return handler(data)
        values, problems = cls.prepare(dict(data))
        # Nested specs are made first: each raises all of its own problems, and they add up here.
        broken = set()
        for name, field in cls.model_fields.items():
            nested = _spec_type(field.annotation)
            if nested is not None and isinstance(values.get(name), Mapping):
                try:
                    values[name] = nested.model_validate(values[name])
                except UserError as error:
                    problems += [f"{name}.{message}" for message in error.messages]
                    broken.add(name)
                    del values[name]
        try:
            spec = handler(values)
        except ValidationError as error:
            for found in error.errors():
                if not (found["type"] == "missing" and found["loc"][0] in broken):
                    problems += _problems(found, cls)
        else:
            # A nested spec that was set aside would make these checks speak about a value nobody gave.
            problems += [] if problems else spec.inconsistencies()
        if problems:
            raise UserError(*problems)
        return spec


def _spec_type(annotation: Any) -> type[Spec] | None:
    """Return the spec in ``X`` or ``X | None``."""
    for option in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(option, type) and issubclass(option, Spec):
            return option
    return None


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in order.

    Those up to ``_LARGEST_TRIED`` and their partners: of a number above its square, some may be left out.
    """
    small = [v for v in range(1, min(math.isqrt(number), _LARGEST_TRIED) + 1) if number % v == 0]
    return sorted({*small, *(number // value for value in small)})


def nearby(values: Iterable[int], asked: int, limit: int = 6) -> str:
    """Return the few values closest to the one asked for, in order, as prose."""
    closest = sorted(values, key=lambda value: abs(value - asked))[:limit]
    return choices(sorted(closest))
