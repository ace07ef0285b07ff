"""Cache of what is read from many rows at the start of a run: prompts, tokenized examples.

An entry is computed again if anything that determines it has changed, or if its file is damaged. The folder is
$ALPHAAPOLLO_CACHE, or alphaapollo/rows in $XDG_CACHE_HOME or ~/.cache. Several processes may use it at a time.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

from alphaapollo.data.rendering import DATE, Renderer
from alphaapollo.utils.disk import replace_file

T = TypeVar("T")
MIN_SECONDS = 5.0  # CPU time; results that need less are not kept
MAX_BYTES = 20 * 2**30  # of all entries; the least recently used entries are removed
CODE_FILES = ("data/*.py", "utils/*.py", "types.py")  # a change of this code, or of LIBRARIES, changes the key
LIBRARIES = ("transformers", "tokenizers", "jinja2")


def load_or_compute(renderer: Renderer, inputs: object, compute: Callable[[], T]) -> T:
    """Return the result of `compute`, if possible from the cache. `renderer` and `inputs` (JSON values) determine it.

    A cached result increases the renderer's counters as `compute` does. Token ids in a `Row` become arrays. Nothing is
    cached for models that read images, or if the tokenizer's code is not part of transformers.
    """
    tokenizer, template = renderer.tokenizer, str(renderer.tokenizer.chat_template)
    if renderer.images or not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return compute()
    rendering = (type(renderer).__name__, str(renderer.template_arguments), renderer.eos_token_ids, template)
    tokens = (str(tokenizer.init_kwargs), tokenizer.backend_tokenizer.to_str())
    files = sorted(file for pattern in CODE_FILES for file in Path(__file__).parents[1].glob(pattern))
    code = [file.read_text() for file in files] + [*map(version, LIBRARIES)]
    today = str(date.today()) if DATE in template and DATE not in renderer.template_arguments else ""
    try:
        key = hashlib.sha256(msgspec.json.encode((rendering, tokens, code, today, inputs))).hexdigest()
    except (TypeError, ValueError):  # a value has no JSON form; `compute` may refuse it
        return compute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(os.environ.get("ALPHAAPOLLO_CACHE") or Path(cache, "alphaapollo/rows")).expanduser() / f"{key}.pickle"
    counters = [value for value in vars(renderer).values() if isinstance(value, Counter)]  # for notices
    before = [counter.copy() for counter in counters]
    if (content := _read_entry(file)) is None:
        started = time.process_time()
        result = compute()
        content = pickle.dumps((result, [now - old for now, old in zip(counters, before, strict=True)]))
        del result  # it may need much more memory than `content`
        if time.process_time() - started >= MIN_SECONDS:
            with suppress(OSError):  # the folder is read-only, or the disk is full
                _write_entry(file, content)
    gc.disable()  # the collector would search all new objects several times
    try:
        result, increases = pickle.loads(content)
    finally:
        gc.enable()
    for counter, old, increase in zip(counters, before, increases, strict=True):
        counter.clear()  # `compute`, if it was called, has increased it
        counter.update(old + increase)
    return result


def _read_entry(file: Path) -> bytes | None:
    """Return the content of an entry; None if the file is missing or damaged, or another user wrote it."""
    with suppress(OSError):
        entry = file.read_bytes()
        digest, content = entry[:32], entry[32:]
        if file.stat().st_uid == os.geteuid() and hashlib.sha256(content).digest() == digest:
            os.utime(file)
            return content
    return None


def _write_entry(file: Path, content: bytes) -> None:
    """Write the digest of an entry and its content, then remove entries beyond MAX_BYTES."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, [hashlib.sha256(content).digest(), content])
    total = 0
    for entry in sorted(file.parent.glob("*.pickle"), key=lambda entry: -entry.stat().st_mtime):
        total += entry.stat().st_size
        if total > MAX_BYTES:
            entry.unlink()
