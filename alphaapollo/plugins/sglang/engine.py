"""SGLang for a run: an engine whose server (server.py) has the Python of SGLang's environment."""

from __future__ import annotations

import sys
from pathlib import Path

from alphaapollo.config.requirements import Requirement
from alphaapollo.engines.remote import RemoteEngine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.plugins.sglang.server_arguments import ARGUMENT_FILES, RESERVED_ARGUMENTS, build_environment


class RemoteSglangEngine(RemoteEngine):
    """Engine with one SGLang replica, in a server process."""

    reads_images = False
    weight_sender = "alphaapollo.plugins.sglang.transfer:SglangTransferSender"
    argument_files, reserved_arguments = ARGUMENT_FILES, RESERVED_ARGUMENTS

    def __init__(self, spec: EngineSpec):
        super().__init__(spec, self.find_python(), "alphaapollo.plugins.sglang.server", build_environment(spec))

    @classmethod
    def find_python(cls) -> Path:
        return Path(sys.prefix, "sglang", "bin", "python")

    @classmethod
    def list_requirements(cls) -> list[Requirement]:
        from alphaapollo.plugins.sglang.requirements import REQUIREMENTS  # imports torch

        return REQUIREMENTS
