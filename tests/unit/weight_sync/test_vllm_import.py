import subprocess
import sys
from pathlib import Path

CODE = """
import os
from alphaapollo.weight_sync.vllm_import import import_vllm
import_vllm()
import torch._inductor.config as config
print(os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"), config.compile_threads)
"""


def test_vllm_does_not_limit_the_threads_of_torch_compile(tmp_path: Path):
    (tmp_path / "vllm.py").write_text("import os; os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'")
    short = f"import sys; sys.path.insert(0, '{tmp_path}')\n"  # the same variable without seconds of imports
    for setting, start, expected in (("None", "", ("None", "32")), ("'5'", short, ("5", "5"))):
        run = "import os; os.environ.pop('TORCHINDUCTOR_COMPILE_THREADS', None)\n"  # set if vLLM is imported here
        run += f"if {setting}: os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = {setting}\n"
        run += f"os.sched_getaffinity = lambda pid: range(99)\n{start}{CODE}"
        output = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=300)
        assert tuple(output.stdout.split()[-2:]) == expected, output.stderr
