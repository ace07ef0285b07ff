"""Print the page "Tested models" of the site: what each architecture supports, and where its turns end.

    python -m scripts.models_page                     # print the page
    python -m scripts.models_page --engine            # first measure all models with vLLM on a CPU (minutes)
    python -m scripts.models_page --engine qwen3      # first measure the models of these families

Refusals come from the code that refuses. tests/unit/models/test_architectures.py measures the other columns. The last
results of --engine are in tests/architectures/engine.json.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib import import_module
from pathlib import Path

from tests.architectures.engine import LIMITS, measure_engine
from tests.architectures.models import ARCHITECTURES, ORIGINAL_CONTEXT, WINDOW
from tests.architectures.refusals import COLUMNS, ENGINE, find_refusals
from tests.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "architectures" / "engine.json"
PACKAGES = ("transformers", "torch", "vllm")

PAGE_TEXT = """# Tested models

Each architecture, by transformers' `model_type`, is tested with a tiny random model on rows (token sequences) of up to
80 tokens, which are longer than its sliding window ({window}) and original context length ({context}). "yes" means that
log-probs and gradients are those of transformers' own model for each row alone, in float32:

* **packed**: with several rows in a micro-batch, padded and packed (`model.attention`, [install.md](install.md));
* **shared prompts**: with the prompt of two rows computed once ([shared prompts](parallelism.md#shared-prompts));
* **Ulysses**: with each row split over two ranks ([sequence parallelism](parallelism.md));
* **checkpointing**: with `enable_gradient_checkpointing=true`;
* **vLLM (CPU)**: vLLM's log-probs of a prompt and of sampled tokens are those of the trainer. 100 tokens were compared
  on {date}; the mean difference was at most {largest} nats in float32.

Tested on a CPU with {packages}. [models.md](models.md) has remarks.

{table}

Reasons, as the error messages give them:

{notes}

## Turns

Each family is tested with its special tokens, flags, `generation_config.json` and format over a vocabulary of bytes.
The table shows special tokens as text, and `\\n` for a newline.

{turns}

* **trained end**: what fine-tuning trains after an answer.
* **after an answer**: what follows a sampled answer if an environment says `?`.
* **tool call**, **result**: the text that the model samples to call `f(a=1)` (`env.action_format=chat_template`), and
  what follows it if the result is `3`.
* **earlier thoughts**: whether the template keeps the thoughts of earlier answers.
"""


def render_page() -> str:
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [["family", "variant", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    agreeing: list[float] = []
    notes: list[str] = []  # reasons, which the table shows by number

    def refer(word: str, reason: str) -> str:
        if reason not in notes:
            notes.append(reason)
        return f"{word} ({notes.index(reason) + 1})"

    for one in ARCHITECTURES:
        result, refusals = measured["models"].get(one.name, 0.0), find_refusals(one)
        cells = {column: refer("refused", refusals[column]) if column in refusals else "yes" for column in COLUMNS}
        if isinstance(result, str):
            cells[ENGINE] = refer("not run", f"vLLM: {result}")
        elif ENGINE not in refusals and result > LIMITS[one.dtype]:
            cells[ENGINE] = refer("refused", f"first weight sync: log-probs differ by {result:.1f} nats")
        elif ENGINE not in refusals and one.dtype == "float32":
            agreeing.append(result)
        elif ENGINE not in refusals:
            cells[ENGINE] = f"yes, in {one.dtype}"
        lines.append([f"`{one.family}`", one.variant, *cells.values()])
    return PAGE_TEXT.format(
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        notes="\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)),
        packages=", ".join(f"{name} {number}" for name, number in measured["packages"].items()),
        date=measured["date"],
        largest=f"{max(agreeing):.0e}",
        window=WINDOW,
        context=ORIGINAL_CONTEXT,
        turns=render_turns(),
    )


def render_turns() -> str:
    """Render the table of turns from the families whose format tests/unit/data/test_families.py checks."""
    columns = ("family", "stop tokens", "trained end", "after an answer", "tool call", "result", "earlier thoughts")
    lines = [columns, ("---",) * len(columns)]
    for one in FAMILIES:
        calls = (one.calls, one.result) if one.calls is not None else ("", "")
        texts = (" ".join(one.stops), one.trained_end, one.after, *calls)
        shown = (f"`{text}`".replace("\n", "\\n").replace("|", "\\|") if text else "" for text in texts)
        lines.append((one.name, *shown, "dropped or changed" if one.rewrites_history else "kept"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure_engines(families: list[str]) -> None:
    """Measure the models of these families (all if empty) with vLLM, and save the results."""
    models = json.loads(RESULTS.read_text(encoding="utf-8"))["models"] if families else {}
    packages = {name: import_module(name).__version__ for name in PACKAGES}
    measured = {"date": str(date.today()), "packages": packages, "models": models}
    for one in ARCHITECTURES:
        if (not families or one.family in families) and "checkpointing" not in find_refusals(one):
            models[one.name] = measure_engine(one)
            print(one.name, models[one.name], flush=True)
            RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="*", metavar="FAMILY", help="first measure these families with vLLM")
    families = parser.parse_args().engine
    if families is not None:
        measure_engines(families)
    print(render_page())


if __name__ == "__main__":
    main()
