"""The table of tools without a server: what is read of arguments, and that no argument reaches a file."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mcp.conftest import ENV

from meshwright.api.inputs import fields_of, read, texts_of
from meshwright.api.loose_arguments import Arguments
from meshwright.errors import InputError
from meshwright.mcp.executor import reply
from meshwright.mcp.tools import TOOLS, input_schema

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**9)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["8xH100"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def arguments(name: str) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from([*TOOLS[name].input_schema("mcp")["properties"]]) | st.text(max_size=5)
    return st.dictionaries(names, VALUES, max_size=4)


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=12)
@given(data=st.data())
def test_what_is_read_is_what_the_schema_allows(name: str, data: st.DataObject) -> None:
    tool = TOOLS[name]
    given_arguments = data.draw(arguments(name))
    schema = tool.input_schema("mcp")
    for field in schema["properties"].values():
        field.pop("enum", None)  # the verbs read these words in any case, and tell what was meant
    try:
        read(tool.request, given_arguments, "mcp")
    except InputError:
        return
    fields = {one.name: one for one in fields_of(tool.request) if "mcp" in one.input.surfaces}
    schema["required"] = [name for name in schema["required"] if name not in fields or not fields[name].input.needed]
    found = Arguments(given_arguments, fields, texts_of(tool.request), files=False).values
    assert not [*jsonschema.Draft202012Validator(schema).iter_errors(found)]


@pytest.mark.parametrize("name", ["recipes", "rules", "explain", "check", "export", "recommend"])
@settings(max_examples=12)
@given(data=st.data())
def test_nothing_that_is_sent_makes_a_fault(name: str, data: st.DataObject) -> None:
    answer = reply(name, data.draw(arguments(name)))
    assert "internal error" not in answer.text
    assert answer.text or not answer.failed
    json.dumps(answer.answer)


CLOSED = """
import json, sys
from meshwright.mcp.executor import reply
from meshwright.mcp.tools import TOOLS, input_schema
for tool in TOOLS.values():  # everything that answers need is imported and read once
    for example in tool.calls:
        assert not reply(tool.name, example).failed, tool.name
opened = []
places = ("/etc/passwd", "~/config.json", "./x.toml", "/etc", "../..", "/etc/hosts.yaml", "C:\\\\x.json", "file:///etc/passwd")
sys.addaudithook(lambda event, args: opened.append((event, str(args[0]))) if event in ("open", "os.listdir") else None)
turn = 0  # every field gets three of the places, in turn
for tool in TOOLS.values():
    for name, field in tool.input_schema("mcp")["properties"].items():
        turn += 3
        tried = [places[(turn + more) % len(places)] for more in range(3)]
        for place in tried if "string" in field["type"] or field["type"] == "array" else ():
            value = [f"data.dataset={place}", f"model={place}"] if field["type"] == "array" else place
            reply(tool.name, {**tool.calls[0], name: value})
for text in (
    "#!/bin/bash\\nsource /etc/profile\\nautomodel finetune llm -c /etc/x.yaml\\n",
    'name = "x"\\nmodel = "/etc/config.json"\\ngoal = "sft"\\ncluster = "/etc/x.toml"\\n',
    "recipe: TrainFinetuneRecipeForNextTokenPrediction\\nmodel:\\n  pretrained_model_name_or_path: /etc\\n",
):
    for name in ("a.sh", "a.toml", "a.yaml"):
        reply("check", {"text": text, "name": name})
mine = tuple(sys.path) + (sys.prefix, sys.base_prefix)
print(json.dumps({
    "opened": [one for one in opened if not one[1].startswith(tuple(p for p in mine if p))],
    "heavy": [name for name in ("torch", "transformers", "mcp", "rich") if name in sys.modules],
}))
"""


def test_no_argument_reaches_a_file_and_nothing_heavy_is_imported() -> None:
    env = {**ENV, "PYTHONDONTWRITEBYTECODE": "1"}  # a module that is compiled late would be written
    done = subprocess.run([sys.executable, "-c", CLOSED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"opened": [], "heavy": []}


def test_without_the_extra_its_name_is_reported(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    answer = meshwright("mcp")
    assert answer.code == 2
    assert 'pip install "meshwright[mcp]"' in answer.err


def test_options_of_http_alone_are_refused(meshwright: Any) -> None:
    answer = meshwright("mcp", "--port", "9000")
    assert answer.code == 2
    assert "--http" in answer.err


@pytest.mark.parametrize("name", ["", "http://x", "*", "a b"])
def test_a_host_is_allowed_by_its_name_alone(meshwright: Any, name: str) -> None:
    assert meshwright("mcp", "--http", "--port", "0", "--allow-host", name).code == 2


def test_a_port_in_use_is_reported(meshwright: Any) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = meshwright("mcp", "--http", "--port", str(taken.getsockname()[1]))
    assert answer.code == 3
    assert "--port 0" in answer.err


def test_the_tools_are_shown_as_json(meshwright: Any) -> None:
    found = meshwright("mcp", "--json").json
    assert [tool["name"] for tool in found["tools"]] == list(TOOLS)
    assert all(tool["input"] == input_schema(TOOLS[tool["name"]], files=True) for tool in found["tools"])


def test_a_layout_that_cannot_be_built_has_no_memory() -> None:
    asked = {"target": "llama3_8b_pretrain_config", "gpus": "8xH100"}
    assert (
        "memory: no figures, this layout cannot be built"
        in reply("check", {**asked, "overrides": ["layout.tp=3"]}).text
    )
    assert " GiB per GPU (" in reply("check", asked).text


def test_the_text_of_a_file_under_another_name_is_named_and_not_repeated() -> None:
    text = "recipe: TrainFinetuneRecipeForNextTokenPrediction\n" * 50
    for tool, name in (("export", "recipe"), ("plan", "recipe"), ("doctor", "log")):
        with pytest.raises(InputError, match=f"unknown argument text; write {name}: ") as wrong:
            read(TOOLS[tool].request, {"text": text, "gpus": "8xH200"}, "mcp")
        assert len(str(wrong.value)) < 200
