"""What a command that a model writes can do in an agent's program: no reward, no failure, no end of the run."""

import asyncio

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

from alphaapollo.config.schema import Agent
from alphaapollo.rollout.agents.programs import ProgramRunner
from alphaapollo.types import EpisodeEnd, Outcome, Score
from tests.unit.rollout.agents.test_runner import run, run_program

TAKES_REWARD = """
import urllib.error, urllib.request, json
answer = ask(endpoint)
body = json.dumps({"request_id": answer.id, "reward": 1000}).encode()
headers = {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"}
try:
    urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/rewards", body, headers))
except urllib.error.HTTPError as error:
    endpoint.reward(answer.id, 0.5)
    return {"reward": 0.25, "refused": float(error.code == 404)}
"""


def test_who_has_the_api_key_alone_gives_no_reward(server, tmp_path):
    (one,) = run(server, tmp_path, TAKES_REWARD)
    assert one.score == Score(0.25, {"refused": 1.0}) and one.reward == 0.75


def test_programs_have_only_listed_variables(monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "HF_TOKEN", "ALPHAAPOLLO_RUN", "MY_DATA"):
        monkeypatch.setenv(name, "value")
    code = "import json, os; json.dump([*os.environ], open(os.environ['ALPHAAPOLLO_RESULT'], 'w'))"

    def list_variables(*own):
        return set(asyncio.run(run_program(Agent(command=f'python3 -c "{code}"', environment=list(own)))).value)

    names = list_variables("MY_DATA")
    assert {"PATH", "MY_DATA", "ALPHAAPOLLO_TASK"} <= names
    assert not names & {"RAY_AUTH_TOKEN", "HF_TOKEN", "ALPHAAPOLLO_RUN"}
    with pytest.raises(ValueError, match=r"env\.agent\.environment: MISSING_ONE"):
        list_variables("MISSING_ONE")


def test_output_of_a_program_is_bounded(monkeypatch):
    sizes, read_result = [], ProgramRunner._read_result

    def measure(runner, folder):
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
        return read_result(runner, folder)

    monkeypatch.setattr(ProgramRunner, "_read_result", measure)
    agent = Agent(command="head -c 100000000 /dev/zero >&2; echo last; exit 3")
    assert "last" in asyncio.run(run_program(agent)).error
    assert 0 < sizes[0] < 100_000


def test_a_written_answer_is_no_reward(server, tmp_path):
    (one,) = run(server, tmp_path, command="curl -s $OPENAI_BASE_URL/models; echo '{\"reward\": 1000}'")
    assert one.score.outcome is Outcome.ENVIRONMENT_FAILED


def test_limit_of_requests_is_a_turn_limit(server, tmp_path):
    code = "n = task['sample']\nfor _ in range(9):\n    ask(endpoint, n=1 + 2 * n)\n    ask(endpoint, n=1 + n)"
    one, several = run(server, tmp_path, code, samples=2, max_requests=4)
    assert one.end is EpisodeEnd.TURN_LIMIT and one.score.outcome is Outcome.SCORED and one.reward == 0.0
    assert "env.agent.max_requests=4" in one.score.reason and len(one.turns) == 4
    assert several.end is EpisodeEnd.TURN_LIMIT and len(several.turns) == 3  # three answers, but not two more
    (one,) = run(server, tmp_path, code, max_requests=4, limit_reward=-1.0)
    assert (one.reward, one.accuracy) == (-1.0, 0.0)


def test_session_with_only_untrained_roles_keeps_its_score(server, tmp_path):
    code = "ask(endpoint, extra_headers={'x-role': 'judge'}); return 1.0"
    (one,) = run(server, tmp_path, code, untrained_roles=["judge"])
    assert one.score.outcome is Outcome.SCORED and one.reward == 1.0 and not one.rows
    assert "env.agent.untrained_roles" in one.score.reason
