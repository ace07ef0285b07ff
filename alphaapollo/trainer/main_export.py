"""A checkpoint as a Hugging Face folder: `python -m alphaapollo.trainer.main_export checkpoint=<run>`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import ExportConfig
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, write. Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    with reported():
        config = load_config(ExportConfig, "export", sys.argv[1:] if argv is None else argv)
        from alphaapollo.launch.export_checkpoint import prepare, write
        from alphaapollo.launch.push_to_hub import push

        try:
            export = prepare(config)
        except ValueError as error:
            return failed(error, 2)
    print(f"{export.weights} in {export.dtype} -> {export.output}")
    try:
        print(write(export))
        if export.push_to:
            print(f"pushed to {push(export.output, export.push_to)}")
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is written", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        return failed(error, 1)
    print(f"the model lies in {export.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
