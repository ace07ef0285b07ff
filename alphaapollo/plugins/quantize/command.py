"""`alphaapollo quantize MODEL OUT`: write a copy of a model with weights of 4 bits."""

from __future__ import annotations

import os
from collections.abc import Sequence

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.utils.hub import expand_home

GROUP_SIZES = (32, 64, 128)


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Quantize a model. Returns exit code 2 if it cannot be quantized."""
    parser = make_parser("quantize")
    parser.add_argument("model", metavar="MODEL", help="folder of a model or of a run, or a hub id")
    parser.add_argument("out", metavar="OUT", type=expand_home, help="folder to write, for model.path=OUT")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=128,
        help="consecutive inputs of a layer that share a scale (default 128); 32 is more exact, and takes 4.5 instead "
        "of 4.125 bits a weight",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a few hundred prompts, as data.train_files or a text file (.txt), with which weights are scaled so that "
        "rounding costs less (default: round to nearest)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # compressed_tensors shows a progress bar whenever a model is loaded
    from alphaapollo.config.schema import Model
    from alphaapollo.plugins.quantize.write import quantize_model
    from alphaapollo.runs.newest_model import export_newest_model, find_newest_model

    path = options.model
    if expand_home(path).is_dir():
        newest = find_newest_model(expand_home(path))
        export_newest_model(newest, options.trust_remote_code, "--trust-remote-code")
        path = str(newest.model_folder)
    source = Model(path=path, trust_remote_code=options.trust_remote_code)
    print(quantize_model(source, options.out, options.group_size, options.prompts))
    return 0
