"""Base class of all sections, and the types and markers that their fields use.

A field declares three kinds of rules:

* valid values: the type of the field, and `Section.problems` for combinations of fields of one section;
* when the field has an effect: `Annotated[float, ActiveWhen("use_kl_loss")]` (config/effects.py reports violations);
* whether a resumed run may change it: `Annotated[str, refuse_on_resume("another model")]` (config/changes.py).

A marker on a field that is a section applies to all fields of that section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Device = Literal["cpu", "cuda"]
Scalar = bool | int | float | str
Verdict = Literal["applied", "kept", "refused", "ignored"]


class ActiveWhen:
    """Marker: the field has an effect only if the field `key` has one of `values`.

    Args:
        key: Field or property of the same section (`enable`) or, with a leading slash, of the complete configuration
            (`/trainer.save_freq`). `@device` is the device of the run. A key that a command does not have is ignored.
        values: Values of `key`; without values, any value except false, null, 0 and empty.
        reason: Reason in the warning; "" = `KEY is VALUE`.
        shown_key: Key in the reason, if `key` is a property.
        silent_value: Value of the marked field that switches nothing on, so no warning is needed.
    """

    expected = True

    def __init__(self, key: str, *values: object, reason: str = "", shown_key: str = "", silent_value: object = ...):
        self.key, self.values, self.reason = key, values, reason
        self.shown_key, self.silent_value = shown_key or key, silent_value

    def is_met(self, value: object) -> bool:
        """Return whether the field has an effect if `key` has this value."""
        return (value in self.values if self.values else bool(value)) is self.expected


class ActiveUnless(ActiveWhen):
    """Marker: the field has no effect if the field `key` has one of `values`; arguments as in ActiveWhen."""

    expected = False


NEEDS_GPU = ActiveWhen("@device", "cuda", reason="it needs a GPU")
CPU_ONLY = ActiveWhen("@device", "cpu", reason="it is for machines without GPUs")


@dataclass(frozen=True)
class OnResume:
    """Marker: what happens if a run resumes with another value of the field.

    when: Condition of the rule; if it is not met, the new value is applied. None = no condition.
    """

    verdict: Verdict
    reason: str = ""
    when: ActiveWhen | None = None


def refuse_on_resume(reason: str) -> OnResume:
    """Return the rule that a resume with another value is refused."""
    return OnResume("refused", reason)


def apply_on_resume(reason: str = "") -> OnResume:
    """Return the rule that a resume uses the new value. reason: consequence of the change, for the console."""
    return OnResume("applied", reason)


ONLY_AT_START = OnResume("ignored")
ANOTHER_MODEL = refuse_on_resume("another model")
ANOTHER_ALGORITHM = refuse_on_resume("another algorithm")
ANOTHER_ENVIRONMENT = refuse_on_resume("another environment")
OTHER_ADAPTERS = refuse_on_resume("other adapters")
OTHER_DATA = refuse_on_resume("other data")
OTHER_CODE = refuse_on_resume("what it registers may be something else under the same name")
REORDERED = apply_on_resume("the remaining rows of the epoch come in another order")
OTHER_SELECTION = apply_on_resume(
    "other rows may be left out for their length, and then the remaining ones come in another order"
)
NEW_LENGTH = apply_on_resume("a cosine schedule gets the new length")
ROUNDING = apply_on_resume("the same batches and draws, but sums round differently")
THREADS = apply_on_resume("with another number of threads sums may round differently")
NEW_DRAWS = apply_on_resume("all later draws differ")
OTHER_REWARDS = apply_on_resume("rewards before and after are not comparable")
OTHER_VALIDATION = apply_on_resume("validations before and after are not comparable")
OTHER_TEACHER = apply_on_resume("distances to the teacher before and after are not comparable")
OTHER_LOSS = apply_on_resume("losses before and after are not comparable")


@dataclass(frozen=True)
class FilePath:
    """Marker: the field is a path of a file or folder; config/check.py checks that it exists.

    required: The field must not be empty if it has an effect.
    """

    kind: Literal["data", "model", "tokenizer", "code", "folder"]
    required: bool = False


CODE = FilePath("code")


def _check_path(value: str) -> str:
    if "\0" in value:
        raise ValueError("a path cannot contain a zero byte. Remove it.")
    if long_name := next((part for part in Path(value).parts if len(part.encode(errors="surrogateescape")) > 200), ""):
        raise ValueError(f"{long_name[:20]}... is longer than 200 bytes. Use a shorter name.")
    return value


def _check_folder_name(value: str) -> str:
    parts = Path(value).parts
    if not parts:
        raise ValueError("the name is empty, so the run would use the folder above. Set a name.")
    if ".." in parts or Path(value).is_absolute():
        raise ValueError("the folder is outside trainer.output_dir. Set a name, and change trainer.output_dir instead.")
    if len(parts) > 1:
        raise ValueError("a run inside another run's folder is moved with it. Set a name without /.")
    return value


def _check_template_arguments(arguments: dict[str, Scalar]) -> dict[str, Scalar]:
    if reserved := arguments.keys() & _RESERVED_ARGUMENTS:
        raise ValueError(f"{min(reserved)} is not an argument of the template itself. Remove it.")
    return arguments


_RESERVED_ARGUMENTS = {  # parameters of transformers' apply_chat_template
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
}

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveRatio = Annotated[float, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
Frequency = Annotated[int, Field(ge=-1)]
TopK = Annotated[int, Field(ge=-1)]
RunPath = Annotated[str, AfterValidator(_check_path)]
FolderName = Annotated[str, AfterValidator(_check_path), AfterValidator(_check_folder_name)]
TemplateArguments = Annotated[dict[str, Scalar], AfterValidator(_check_template_arguments)]


class Section(BaseModel):
    """Base class of all sections: immutable, with strict types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    unread: ClassVar[Mapping[str, str]] = {}
    """{key or section: reason} of what a command does not read; set in the configuration class of the command."""
    on_resume: ClassVar[Mapping[str, OnResume]] = {}
    """{key or section: rule} that replaces the rules of the fields, "" = all other keys; set by a command."""

    def problems(self) -> Iterator[str]:
        """Yield an error `KEY=VALUE ...` with a fix for each invalid combination of fields; keys are relative."""
        return iter(())

    def warnings(self) -> Iterator[str]:
        """Yield a warning, in the form of `problems`, for each combination that works, but perhaps not as intended."""
        return iter(())

    @model_validator(mode="after")
    def _check_problems(self) -> Section:
        if problems := list(self.problems()):
            raise ValueError("\n".join(problems))
        return self
