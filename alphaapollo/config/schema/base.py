"""Base class of the schema's sections, and the types and markers (objects in `Annotated`) of their fields.

The schema declares three kinds of rules for a field:

* valid values: the type of the field; `Annotated[bool, Requires(ActiveWhen("name", "vllm"))]` for what it needs in
  another field. All other combinations that do not work are rows of the table in config/requirements.py;
* when the field has an effect: `Annotated[float, ActiveWhen("use_kl_loss")]` (config/check.py);
* whether a resumed run may change it: `Annotated[str, ResumeRule("refused", "another model")]` (config/changes.py).

A marker on a field that is a section applies to all fields of that section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler

Device = Literal["cpu", "cuda"]
Scalar = bool | int | float | str
Verdict = Literal["applied", "kept", "refused", "ignored"]
"""applied: the new value is used. kept: the new value has no effect. refused: error. ignored: not even reported."""


NOT_SET = ...  # in markers, because None may be the value of a field


class ActiveWhen:
    """Marker in `Annotated`: the field has an effect only if another field, `key`, has one of `values`.

    Args:
        key: Field or property of the same section (`enable`) or, with a leading slash, of the complete configuration
            (`/trainer.save_freq`). `@device` is the device of the run. A key that a command does not have is ignored.
        values: Values of `key`; without values, any value except false, null, 0 and empty.
        reason: Reason in the warning; "" = `KEY is VALUE`.
        shown_key: Key to name in the reason instead of `key`, if `key` is a property, which users cannot set.
        silent_value: Value of the marked field that turns the feature off, so that no warning is shown for it.
    """

    expected = True

    def __init__(self, key: str, *values: object, reason: str = "", shown_key: str = "", silent_value: Any = NOT_SET):
        self.key, self.values, self.reason = key, values, reason
        self.shown_key, self.silent_value = shown_key or key, silent_value

    def is_met(self, value: object) -> bool:
        """Return whether the field with this marker has an effect when the field that `key` names has this value."""
        return (value in self.values if self.values else bool(value)) is self.expected


class ActiveUnless(ActiveWhen):
    """Marker in `Annotated`: the field has no effect if another field, `key`, has one of `values` (see ActiveWhen)."""

    expected = False


@dataclass(frozen=True)
class Requires:
    """Marker in `Annotated`: if the field has an effect and a value other than its default, `condition`, which is about
    another field, must be met. Nothing is needed if the command does not have that field."""

    condition: ActiveWhen
    fix: str = ""  # "" = set the field of the condition, or the default
    when: object = NOT_SET  # if set, the only value of the marked field that needs the condition


NEEDS_GPU = ActiveWhen("@device", "cuda", reason="it needs a GPU")
CPU_ONLY = ActiveWhen("@device", "cpu", reason="it is for machines without GPUs")


@dataclass(frozen=True)
class ResumeRule:
    """Marker in `Annotated`: what happens if a run resumes with another value of the field."""

    verdict: Verdict
    reason: str = ""  # cause of a refusal, or consequence of the change, for the console
    when: ActiveWhen | None = None  # condition of the rule; if it is not met, the new value is applied


ONLY_AT_START = ResumeRule("ignored")
CHANGES_MODEL = ResumeRule("refused", "another model")
CHANGES_ALGORITHM = ResumeRule("refused", "another algorithm")
CHANGES_ENVIRONMENT = ResumeRule("refused", "another environment")
CHANGES_OPTIMIZER = ResumeRule("refused", "another optimizer, whose state the checkpoint does not have")
CHANGES_ADAPTERS = ResumeRule("refused", "other adapters")
CHANGES_DATA = ResumeRule("refused", "other data")
CHANGES_CODE = ResumeRule("refused", "the new file may register different code under the same names")


@dataclass(frozen=True)
class FilePath:
    """Marker in `Annotated`: the field is a path. `~` is replaced, and config/check.py checks that the path exists."""

    kind: Literal["data", "model", "tokenizer", "code", "folder", "unchecked"]
    """model and tokenizer: folder or hub id; unchecked: the path need not exist."""
    required: bool = False  # whether an empty path is an error, if the field has an effect
    may_be_url: bool = False

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
        def expand(value: str | list[str]) -> str | list[str]:
            return [*map(expanduser, value)] if isinstance(value, list) else expanduser(value)

        return AfterValidator(expand).__get_pydantic_core_schema__(source, handler)


CODE = FilePath("code")
NAMES_CODE = "names code"
"""Marker in `Annotated`: the field names code, a program or a server that the command uses. As for CODE, a value from a
folder's saved configuration must be repeated on the command line (config/load.py)."""


@dataclass(frozen=True)
class RegisteredName:
    """Marker in `Annotated`: the field is a name of a registry. `find` names a function of this package that raises
    ValueError for an unknown name, as `module:function`. The file of a key `custom_module` may register more names."""

    find: str


def matching(pattern: str, error: str) -> AfterValidator:
    """Return the validator of a text that must match a pattern. error: message with what is needed and a fix."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError(error)
        return value

    return AfterValidator(check)


Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveRatio = Annotated[float, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
CountOrMinusOne = Annotated[int, Field(ge=-1)]  # -1 = never, all, or automatic
RunPath = Annotated[
    str,
    FilePath("unchecked"),
    matching(r"[^/\0]{0,200}(/[^/\0]{0,200})*", "a name in the path is longer than 200 characters. Shorten it."),
]
FolderName = Annotated[
    str,
    matching(
        r"\.{0,2}[^./\0][^/\0]{0,199}",
        "it must be the name of a folder in trainer.output_dir: 1 to 200 characters without /. Set another name.",
    ),
]
TemplateArguments = dict[str, Scalar]


class Section(BaseModel):
    """Base class of all sections: immutable, with strict types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    unread_keys: ClassVar[Mapping[str, str]] = {}
    """{key or section that the command does not read: reason}; set in the configuration class of a command."""
    resume_rules: ClassVar[Mapping[str, ResumeRule]] = {}
    """{key or section: rule that replaces the ResumeRule markers of its fields}; "" = all other keys. Set likewise."""
    program: ClassVar[str] = ""
    """Module that `python -m` runs for a command that is not in trainer/. Set likewise."""
