"""`alphaapollo export RUN [OUT]`: run main_export with `checkpoint=RUN output=OUT`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from alphaapollo.config.keys import format_override


def main(argv: Sequence[str] | None = None) -> int:
    """Translate the arguments to keys of main_export, run it, and return its exit code."""
    options = _parse_arguments(argv)
    values = {"checkpoint": options.run, "output": options.out, "push_to": options.push}
    overrides = [format_override(key, value) for key, value in values.items() if value]
    export_main = importlib.import_module("alphaapollo.trainer.main_export").main
    return export_main([*overrides, *options.keys])


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="alphaapollo export",
        usage="alphaapollo export RUN [OUT] [--push OWNER/NAME] [KEY=VALUE ...]",
        description="Export a checkpoint as a folder for transformers and vLLM, with a model card. Verifies that "
        "transformers computes the same outputs with it. Needs no GPU.",
        epilog="keys: role=policy|critic, dtype=float32|bfloat16, export_lora=merged|adapter, model_path=FOLDER, "
        "the current location of the run's initial model (docs/checkpoints.md)",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, for its newest checkpoint, or a checkpoint")
    parser.add_argument(
        "out", metavar="OUT", nargs="?", help="the folder to write (default <RUN>/exported/<checkpoint>)"
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the folder to the Hugging Face hub, with your own token"
    )
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)
    if options.out and "=" in options.out:  # OUT was omitted
        options.out, options.keys = None, [options.out, *options.keys]
    return options
