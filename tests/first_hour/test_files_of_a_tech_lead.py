"""What a tech lead types while trying the tool for a team: CI on a repository of all kinds of files, HTTP, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DEEPSPEED = '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "bf16": {"enabled": true}}\n'
OTHERS = {  # files that are no config of a training, in formats that configs have
    "manifest.yaml": b"kind: Service\n---\nkind: Deployment\n",
    "chart.yaml": b"kind: Job\nmetadata:\n  name: {{ .Release.Name }}\n{{- if .Values.x }}\nspec: {}\n{{- end }}\n",
    "mkdocs.yml": b"plugins: !!python/name:emoji.index\n",
    "tsconfig.json": b'{ // compiler\n "compilerOptions": {},\n}\n',
    "package-lock.json": b'{"packages": {"' + b"a" * 1_100_000 + b'": {}}}',
    "legacy.yaml": "name: café\n".encode("latin-1"),
}
TRAININGS = {
    "several.yaml": b"base_model: m\nlearning_rate: 2e-5\n---\nmicro_batch_size: 1\n",
    "template.yaml": b"micro_batch_size: {{ .Values.batch }}\nlearning_rate: 2e-5\n",
    "comment.json": b'{ // stage 3\n "zero_optimization": {"stage": 3}}\n',
    "wide.yaml": "learning_rate: 2e-5\n".encode("utf-16"),
    "broken.toml": b"[training]\nsteps = \n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    return tmp_path


def test_check_of_a_repository_skips_unreadable_files_of_other_programs(meshwright: Any) -> None:
    for name, content in OTHERS.items():
        Path(name).write_bytes(content)
    answer = meshwright("check", ".", "--json")
    assert answer.code == 0, answer.out + answer.err
    assert {one["file"] for one in answer.json["skipped"]} == {*OTHERS}
    assert all(one["reason"] for one in answer.json["skipped"])


@pytest.mark.parametrize("name", TRAININGS)
def test_check_of_a_repository_reports_unreadable_files_that_train(meshwright: Any, name: str) -> None:
    Path(name).write_bytes(TRAININGS[name])
    answer = meshwright("check", ".")
    assert answer.code == 2
    assert f"error: {name}: " in answer.out + answer.err
    assert "1 not readable" in answer.out + answer.err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--version", "--json"), "meshwright COMMAND --json"),
        (("--json", "models", "--gpus", "8xH100"), "meshwright models --gpus 8xH100 --json"),
    ],
)
def test_json_before_the_command_has_a_fix_with_a_command(words: tuple[str, ...], fix: str, meshwright: Any) -> None:
    assert f"it goes behind the command: {fix}." in meshwright(*words).err
