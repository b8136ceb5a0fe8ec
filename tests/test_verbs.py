"""Each verb is declared once: what surfaces derive from it agrees, and real responses match the published schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.cli.conftest import Answer, meshwright  # noqa: F401  # a fixture
from tests.cli.test_dryrun import dry_run_result
from tests.first_hour.test_share import own_run
from tests.rehearsal.results import rehearsal_result

from meshwright import api, choices, frameworks
from meshwright.api import completion, requests, schema
from meshwright.api.inputs import TEXT_BYTES, fields_of, json_schema
from meshwright.api.verbs import GROUPS, VERBS, verbs_on
from meshwright.cli.app import app
from meshwright.frameworks import registry
from meshwright.mcp.compact import COMPACT, output_schema
from meshwright.mcp.executor import reply
from meshwright.mcp.tools import TOOLS
from meshwright.recipes import files

SCHEMAS = Path(__file__).parents[1] / "docs" / "schema"
RECIPE = "llama3_8b_pretrain_config"
LOG = VERBS["doctor"].calls[0]["log"]
LAUNCH = ("launch", RECIPE, "--scheduler", "slurm", "--gpus", "2x8xH100")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "recommend": (
        ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "peft", "--explain"),
        ("recommend", "llama3-70b", "--gpus", "1xH100", "--goal", "pretrain"),
    ),
    "plan": (("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--top", "2"),),
    "size": (
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--tokens", "1T", "--price", "2", "--max-gpus", "64"),
    ),
    "estimate": (("estimate", RECIPE), ("estimate", RECIPE, "layout.tp=3")),
    "check": (("check", RECIPE, "--gpus", "16xA100-80"), ("check", "run.sh", RECIPE, "--gpus", "8xH100")),
    "export": (("export", RECIPE, "--to", "megatron-lm", "--gpus", "8xH100"),),
    "compare": (
        ("compare", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engines", "meshwright,kempnerforge"),
        ("compare", RECIPE, "llama3_8b_sft_config", "--gpus", "8xH100"),
    ),
    "import": (("import", "run.sh", "--gpus", "8xH100", "--model", "llama3-8b"),),
    "doctor": (("doctor", "train.log", "--recipe", RECIPE, "--gpus", "8xH100"),),
    "launch": (LAUNCH,),
    "inspect": (("inspect", "deepseek-v3"), ("inspect", "gemma3-27b", "--seq", "128k")),
    "recipes": (("recipes", "llama"), ("recipes", "nothing of this name")),
    "recipe": (("recipe", RECIPE), ("recipe", RECIPE, "--format", "yaml")),
    "models": (("models",),),
    "gpus": (("gpus",),),
    "rules": (("rules",), ("rules", "automodel")),
    "explain": (("explain", "layout.tp"), ("explain", "heads.attention"), ("explain", "speed.low-mfu")),
}
"""Commands without torch; the others are in the tests below."""
ADDRESSES = {
    "recommend": "recommend?model=llama3-8b&gpus=8xH100&goal=sft",
    "plan": "plan?target=llama3-8b&gpus=8xH100&goal=sft&top=1&everything=true",
    "size": "size?model=llama3-8b&gpu=H100&goal=sft",
    "estimate": f"estimate?target={RECIPE}",
    "check": f"check?target={RECIPE}",
    "compare": f"compare?target={RECIPE}&more=llama3_8b_sft_config",
    "export": f"export?target={RECIPE}&to=torchtitan",
    "inspect": "inspect?model=qwen3-30b-a3b&seq=32k",
    "recipes": "recipes?query=llama",
    "recipe": f"recipes/{RECIPE}?format=toml",
    "models": "models?query=qwen3",
    "gpus": "gpus",
    "rules": "rules?pitfalls=true",
    "scale": "scale?model=llama3-8b&gpu=H100&gpu=A100-80&goal=sft",
    "schedule": "schedule?target=llama3_70b_pretrain_config&first=4",
    "model": "models/llama3_8b",
    "complete": "complete?kind=models&query=llama",
}
SLOW = ("accuracy",)  # every shipped measurement is estimated
TEXTS = ("import", "doctor")  # sent as a body
SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --tensor-model-parallel-size 3\n"
)


def violations(name: str, answer: Any) -> list[str]:
    """Return how a response differs from its published schema."""
    assert next(iter(answer)) == "schema"
    sent = json.loads(json.dumps(answer))  # tuples are sent as lists
    return [f"{one.json_path}: {one.message}" for one in validator(name).iter_errors(sent)]


@cache
def validator(name: str) -> Any:
    """Return the validator of a published schema, which is checked once."""
    published = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    made = jsonschema.validators.validator_for(published)
    made.check_schema(published)
    return made(published)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "train.log").write_text(LOG)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_match_the_published_schema(meshwright: Callable[..., Answer], folder: Path, name: str) -> None:  # noqa: F811
    for command in COMMANDS[name]:
        answer = meshwright(*command, "--json")
        assert answer.code in (0, 1), answer.err
        assert not violations(name, answer.json)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny training and its response."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    done = api.train("qwen3_8b_sft_config", tiny=True, nproc=1, quiet=True, out=str(out), overrides=["train.steps=2"])
    return out, done


def test_runs_match_the_published_schema(run: tuple[Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out, done = run
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    assert not violations("train", api.to_json(api.train_response(done)))
    assert not violations("bench", api.to_json(api.train_response(done)))
    tokenized = api.tokenize([str(tmp_path / "text.txt")], "bytes", str(tmp_path / "tokens"))
    assert not violations("tokenize", api.to_json(tokenized))
    chat = '{"prompt": "hi", "response": "hello"}'
    (tmp_path / "chats.jsonl").write_text(chat)
    shown = api.samples("qwen3_8b_sft_config", str(tmp_path / "chats.jsonl"), overrides=["data.tokenizer=bytes"])
    assert not violations("samples", api.to_json(shown))
    assert not violations("generate", api.to_json(api.generate(str(out), "hello", max_tokens=2)))
    assert not violations("evaluate", api.to_json(api.evaluate(str(out), samples=8, nproc=1)))
    assert not violations("convert", api.to_json(api.convert(str(out), str(tmp_path / "model"))))


def test_dry_runs_match_the_published_schema() -> None:
    assert not violations("dryrun", api.to_json(api.dryrun_response(dry_run_result())))
    plan = api.recommend("llama3-8b", "8xH100", "sft")
    brief = api.to_json(api.dryrun_response(dry_run_result(), brief=True))
    assert not violations("recommend", {**api.to_json(api.plan_response(plan)), "dry_run": brief})


def test_rehearsals_match_the_published_schema() -> None:
    assert not violations("rehearse", api.to_json(api.rehearsal_response(rehearsal_result())))


def test_measurements_match_the_published_schema(meshwright: Callable[..., Answer], folder: Path) -> None:  # noqa: F811
    table = Path(__file__).parents[1] / "benchmarks" / "data" / "measurements.csv"
    rows = table.read_text(encoding="utf-8").splitlines()
    (folder / "runs.csv").write_text("\n".join(rows[:40]) + "\n")
    assert not violations("accuracy", meshwright("accuracy", "runs.csv", "--json").json)
    verb = VERBS["calibrate"]
    from meshwright.costs.calibrate import MachineProfile

    assert not violations("calibrate", api.to_json(verb.respond([MachineProfile("H100")], verb.request())))


def test_shared_measurements_match_the_published_schema(meshwright: Callable[..., Answer], folder: Path) -> None:  # noqa: F811
    own_run(folder / "run")
    assert not violations("share", meshwright("share", "run", "--json").json)


def test_every_command_has_its_schema_checked() -> None:
    torch = {"train", "bench", "tokenize", "samples", "generate", "evaluate", "convert", "dryrun", "accuracy"}
    assert {verb.name for verb in verbs_on("cli")} == COMMANDS.keys() | torch | {"calibrate", "rehearse", "share"}
    assert {verb.name for verb in verbs_on("http")} == ADDRESSES.keys() | {*SLOW, *TEXTS}
    assert schema.published().keys() == {path.name for path in SCHEMAS.glob("*.json")}


@pytest.fixture(scope="module")
def client() -> Any:
    testclient = pytest.importorskip("fastapi.testclient")
    from meshwright.web.app import Settings, create_app

    return testclient.TestClient(create_app(Settings(workers=0)), base_url="http://127.0.0.1")


@pytest.mark.parametrize("name", ADDRESSES)
def test_http_matches_the_published_schema(client: Any, name: str) -> None:
    answer = client.get(f"/api/{ADDRESSES[name]}")
    assert answer.status_code == 200, answer.text
    assert not violations(name, answer.json())


@pytest.mark.parametrize("name", TEXTS)
def test_texts_match_the_published_schema(client: Any, name: str) -> None:
    answer = client.post(f"/api/{name}", json=dict(VERBS[name].calls[0]))
    assert answer.status_code == 200, answer.text
    assert not violations(name, answer.json())
    assert client.get(f"/api/{name}").status_code in (404, 405)


@pytest.mark.parametrize("name", TOOLS)
def test_tools_match_the_published_schema(name: str) -> None:
    for call in TOOLS[name].calls:
        answer = reply(name, call).answer
        jsonschema.validate(answer, output_schema(name))
        if name not in COMPACT:
            assert not violations(name, answer)


WRONG = {
    "unknown choice": ("recommend", {"model": "llama3-8b", "gpus": "8xH100", "goal": "stf"}),
    "unknown name": ("recommend", {"model": "lama3-8b", "gpus": "8xH100", "goal": "sft"}),
    "too many": ("plan", {"target": "llama3-8b", "gpus": "8xH100", "goal": "sft", "top": requests.MAX_PLANS + 1}),
    "too long": ("recommend", {"model": "y" * 5000, "gpus": "8xH100", "goal": "sft"}),
    "bad override": ("estimate", {"target": RECIPE, "overrides": ["layout.tpp=2"]}),
    "bad length": ("estimate", {"target": RECIPE, "seq": "long"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_the_same_on_every_surface(meshwright: Callable[..., Answer], client: Any, case: str) -> None:  # noqa: F811
    from meshwright.api.inputs import command_words

    name, arguments = WRONG[case]
    printed = meshwright(name, *command_words(VERBS[name].request, arguments), "--json")
    assert printed.code == 2
    errors = [printed.json, client.get(f"/api/{name}", params=arguments).json(), reply(name, arguments).answer]
    for error in errors:
        assert not violations("error", error)
    assert len({json.dumps({k: v for k, v in e["error"].items() if k != "fix"}) for e in errors}) == 1


def test_one_text_limit(client: Any) -> None:
    long = {"text": "#" * (TEXT_BYTES + 1), "name": "run.sh"}
    errors = [client.post("/api/check", json=long).json()["error"], reply("check", long).answer["error"]]
    assert errors[0]["message"] == errors[1]["message"]
    assert f"{TEXT_BYTES:,}" in errors[0]["message"]
    assert files.MAX_BYTES == TEXT_BYTES  # as files on the command line


def test_http_and_tools_take_the_same_inputs() -> None:
    for name, tool in TOOLS.items():
        if "http" in tool.surfaces:
            http, mcp = (json_schema(tool.request, surface)["properties"] for surface in ("http", "mcp"))
            only = {f.name for f in fields_of(tool.request) if len({*f.input.surfaces} & {"http", "mcp"}) == 1}
            assert {**http, **mcp}.keys() - only == http.keys() & mcp.keys() - only, name
            assert all(http[one] == mcp[one] for one in http.keys() & mcp.keys())


def test_choices_are_those_of_the_packages() -> None:
    assert choices.FRAMEWORKS == frameworks.NAMES
    assert {*registry.FORMATS} == {*choices.FRAMEWORKS, *choices.CHECKED_ONLY}
    assert choices.FORMATS == files.FORMATS
    assert tuple(completion.NAMES) == requests.NAME_KINDS


def test_a_function_has_the_fields_of_its_request() -> None:
    import inspect

    public = [field.name for field in fields_of(requests.Recommend) if field.name != "notes"]  # set by synonyms only
    assert list(inspect.signature(api.recommend).parameters) == public
    assert api.recommend.__doc__


def help_page(*words: str) -> str:
    """The help page on a terminal of 80 columns."""
    import click
    from click.testing import CliRunner

    result = CliRunner().invoke(app, [*words, "--help"], terminal_width=80, max_content_width=80)
    assert result.exit_code == 0, result.output
    assert isinstance(app, click.Group)
    return result.output


def test_commands_are_listed_in_groups_and_no_line_is_cut() -> None:
    page = help_page()
    places = [page.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    lines = page.split("\nPlan:\n")[1].split("\n\n  Examples:")[0].splitlines()
    commands = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert len(commands) == len(verbs_on("cli")) + 3
    assert list(commands)[:2] == ["recommend", "plan"]
    assert "…" not in page
    assert "..." not in "".join(commands.values())
    for line in commands.values():
        assert len(line) <= 80
        assert line.endswith(".")  # the sentence is whole and on one line


@pytest.mark.parametrize("name", [verb.name for verb in verbs_on("cli")])
def test_help_describes_every_input(name: str) -> None:
    page = " ".join(help_page(name).split())
    for field in fields_of(VERBS[name].request):
        if "cli" in field.input.surfaces:
            assert field.label in page
            assert " ".join(field.input.help.split())[:40] in page
    assert "Examples:" in page


def test_a_command_imports_only_what_it_runs() -> None:
    code = """
import sys
from meshwright.cli.run import run
try:
    run(sys.argv[1:])
except SystemExit:
    heavy = ("torch", "pydantic", "fastapi", "numpy", "meshwright.doctor")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""

    def imported(*words: str) -> str:
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip()

    assert imported("--help") == "[]"
    assert imported("recommend", "--help") == "[]"
    assert imported("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json") == "['numpy']"
