"""Export a checkpoint as a Hugging Face folder: `python -m alphaapollo.trainer.main_export checkpoint=<run>`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import ExportConfig
from alphaapollo.utils.entry_point import entry_point


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint as a Hugging Face folder.

    Returns 0 if done, 1 if failed, 2 if the input is invalid, 130 if interrupted.
    """
    with exit_on_config_error():
        config = load_config(ExportConfig, "export", sys.argv[1:] if argv is None else argv)
        from alphaapollo.launch.export_checkpoint import (
            is_adapter,
            merge_adapter,
            prepare_export,
            push_folder,
            write_export,
        )

        try:
            if is_adapter(config.checkpoint):
                output = merge_adapter(config)
                pushed = f", pushed to {push_folder(output, config.push_to)}" if config.push_to else ""
                print(f"model written to {output}{pushed}")
                return 0
            export = prepare_export(config)
        except ValueError as error:
            return report_error(error, 2)
    print(f"{export.weights_folder} in {export.dtype} -> {export.output}")
    try:
        print(write_export(export))
        if export.push_to:
            print(f"pushed to {push_folder(export.output, export.push_to)}")
    except (ValueError, OSError) as error:
        return report_error(error, 1)
    print(f"model written to {export.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
