import subprocess
import sys

import pytest

CODE = """
import os
from alphaapollo.engines.weight_sync.vllm_import import import_vllm
import_vllm()
import torch._inductor.config as config
print(os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"), config.compile_threads)
"""


@pytest.mark.nightly
def test_vllm_does_not_limit_the_threads_of_torch_compile():
    for setting, expected in ((None, ("None", "32")), ("5", ("5", "5"))):
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": setting} if setting else {}
        run = "import os; os.environ.pop('TORCHINDUCTOR_COMPILE_THREADS', None)\n"  # set if vLLM is imported here
        run += f"os.environ.update({environment}); os.sched_getaffinity = lambda pid: range(99)\n{CODE}"
        output = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=300)
        assert tuple(output.stdout.split()[-2:]) == expected, output.stderr
