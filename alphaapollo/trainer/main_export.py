"""Export a checkpoint as a Hugging Face folder: `python -m alphaapollo.trainer.main_export checkpoint=<run>`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import ExportConfig
from alphaapollo.processes.entry_point import entry_point, run_program
from alphaapollo.utils.hub import needs_conversion


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint as a Hugging Face folder.

    Returns 0 if done, 1 if failed, 2 if the input is invalid, 130 if interrupted.
    """
    with exit_on_config_error():
        config = load_config(ExportConfig, "export", sys.argv[1:] if argv is None else argv)
        from alphaapollo.launch.export_checkpoint import convert_model, prepare_export, push_folder, write_export

        try:
            if needs_conversion(config.checkpoint):
                output, export = convert_model(config), None
            else:
                export = prepare_export(config)
                output = export.output
        except ValueError as error:
            return report_error(error, 2)
    try:
        if export:
            print(f"{export.weights_folder} in {export.dtype} -> {export.output}")
            print(write_export(export))
        if config.push_to:
            print(f"pushed to {push_folder(output, config.push_to)}")
    except (ValueError, OSError) as error:
        return report_error(error, 1)
    print(f"model written to {output}")
    return 0


if __name__ == "__main__":
    run_program(main)
