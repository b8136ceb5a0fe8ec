"""Item 16: every command is a documented Python function, results print readably, and errors have a fix."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import meshwright as mw
from meshwright.api.inputs import fields_of
from meshwright.api.verbs import VERBS, verbs_on

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
NAMES = {verb.name: mw.COMMANDS.get(verb.name, verb.name) for verb in verbs_on("cli")}


def test_dir_lists_every_command_without_importing_anything_heavy() -> None:
    code = "import sys, meshwright; names = dir(meshwright); print(*names, '|', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    listed, _, loaded = done.stdout.partition("|")
    assert set(NAMES.values()) <= set(listed.split())
    assert not {"torch", "transformers", "numpy", "msgspec"} & set(loaded.split())


def test_after_packages_of_the_same_name_are_loaded_the_functions_remain() -> None:
    import meshwright.dryrun
    import meshwright.launch  # noqa: F401

    assert all(callable(getattr(mw, name)) for name in NAMES.values())


@pytest.mark.parametrize("verb", [name for name in NAMES if VERBS[name].request is not None])
def test_help_documents_every_parameter(verb: str) -> None:
    function = getattr(mw, NAMES[verb])
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert "Annotated" not in shown
    for field in fields_of(VERBS[verb].request):
        if "cli" in field.input.surfaces:
            assert f"{field.name}: {field.input.help}" in shown
            assert field.name in inspect.signature(function).parameters
    assert "notes" not in inspect.signature(function).parameters


def test_results_print_readably_and_as_escaped_html() -> None:
    plan = mw.recommend("llama3-8b", "8xH100", "sft")
    for text in (str(plan), repr(plan)):
        assert text.startswith("Recipe   llama3_8b_sft_config")
        assert "GiB per GPU" in text
        assert len(text) < 3000
    assert plan._repr_html_().startswith("<table")
    assert "llama3_8b_sft_config" in plan._repr_html_()
    broken = mw.check("llama3_8b_sft_config", gpus="8xH100", overrides=["layout.tp=3"])
    assert "cannot start" in str(broken)
    assert "error: " in repr(broken)
    assert "GPUs" in str(mw.size("llama3-8b", "sft", "H100"))
    assert "Searched" in str(mw.plan("llama3-8b", "8xH100", "sft", top=2))


def test_html_is_safe(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)</script>".replace("/", "_")
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, '
        '"num_attention_heads": 4, "vocab_size": 999}'
    )
    html = mw.recommend(str(folder / "config.json"), "1xH100", "pretrain")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_plain_values_match_the_schema() -> None:
    results = {
        "recommend": mw.recommend("llama3-8b", "8xH100", "sft"),
        "size": mw.size("llama3-8b", "sft", "H100"),
        "check": mw.check("llama3_8b_sft_config"),
        "export": mw.export("llama3_8b_pretrain_config", "torchtitan"),
        "explain": mw.explain("layout.tp"),
    }
    for verb, result in results.items():
        answer = mw.to_dict(result)
        assert answer["schema"] == "meshwright/2"
        jsonschema.validate(json.loads(json.dumps(answer)), mw.schema(verb))
    with pytest.raises(mw.InputError) as caught:
        mw.schema("recomend")
    assert "recommend" in caught.value.fix
    jsonschema.validate(mw.to_dict(caught.value), mw.schema("error"))


def test_errors_are_one_family_with_field_value_and_fix() -> None:
    assert issubclass(mw.MissingPackageError, mw.InputError)
    assert issubclass(mw.OutputError, mw.MeshwrightError)
    with pytest.raises(mw.MeshwrightError) as caught:
        mw.recommend("lama3-8b", "8xH100", "sft")
    assert caught.value.value == "lama3-8b"
    assert "llama3_8b" in caught.value.fix


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ({"gpu": "RTX 4090"}, ['gpus="RTX 4090"']),
        ({"data": "my chats.jsonl"}, ['dataset="my chats.jsonl"']),
        ({"batch_size": 4}, ['overrides={"train.global_batch_size": 4}', 'overrides={"layout.micro_batch_size": 4}']),
    ],
)
def test_fixes_of_parameters_are_python_not_shell(typed: dict[str, Any], fix: list[str]) -> None:
    with pytest.raises(mw.MeshwrightError) as caught:
        mw.recommend("qwen3-4b", goal="lora", **typed)
    assert list(caught.value.fix) == fix


def test_the_page_runs_and_lists_every_command() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [name for name in NAMES.values() if f"`{name}`" not in page] == []
