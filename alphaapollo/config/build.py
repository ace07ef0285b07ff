"""Convert nested values to a configuration object. Workers use this module, so it does not import Hydra."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from alphaapollo.config.effects import find_unmet_requirements
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.key_errors import describe_validation_error
from alphaapollo.config.keys import rename_verl_group_size_key
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import WITHOUT_RULES, Section

SchemaT = TypeVar("SchemaT", bound=BaseModel)


def build_config(schema: type[SchemaT], values: dict[str, object]) -> SchemaT:
    """Create a configuration object from nested values. Raises ConfigError with all errors. May change `values`."""
    if schema is Config:
        rename_verl_group_size_key(values)
    text = json.dumps(values)
    try:
        config = schema.model_validate_json(text, strict=True)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in describe_validation_error(schema, detail, values)]
        with suppress(ValidationError):
            lines += _list_unmet(schema.model_validate_json(text, strict=True, context=WITHOUT_RULES))
        raise ConfigError(list(dict.fromkeys(lines))) from None
    if unmet := _list_unmet(config):
        raise ConfigError(unmet)
    return config


def _list_unmet(config: BaseModel) -> list[str]:
    return list(find_unmet_requirements(config)) if isinstance(config, Section) else []
