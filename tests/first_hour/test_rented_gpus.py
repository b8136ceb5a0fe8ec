"""Rented GPUs: the network of a cluster file, several files in one check, and what an engine's files can say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from meshwright import models, planner
from meshwright.api.engine_configs import exported_for
from meshwright.clusters import cluster
from meshwright.recipes import index, overrides
from meshwright.recipes.capabilities import engines_with
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.values import bare_type

CLUSTER = 'gpu = "H100"\nnodes = 4\ngpus_per_node = 8\n'


def test_the_network_of_a_cluster_file_is_printed_with_its_unit(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "eth.toml"
    of_node = "a network of {} Gb/s per GPU ({} Gb/s per node), from"
    bare = '100 is read as GB/s, "100 Gb/s" would be Gb/s'
    for written, printed, warned in (
        ("network_gb_s_per_node = 100", of_node.format(100, 800), True),
        ('network_gb_s_per_node = "100 Gb/s"', of_node.format(12.5, 100), False),
        ('network_gb_s = "400 Gb/s"', of_node.format(400, "3,200"), False),
    ):
        file.write_text(f"{CLUSTER}{written}\n")
        answer = " ".join(meshwright("estimate", "llama3_8b_pretrain_config", "--gpus", str(file)).out.split())
        assert printed in answer, written
        assert (bare in answer) is warned, written
    for key in ("network_gb_s", "network_gb_s_per_node", "nvlink_domain"):
        assert "key of a cluster file" in meshwright("explain", key).out


def test_each_of_several_checked_files_has_its_own_ok(meshwright: Any, tmp_path: Path) -> None:
    good, bad = "llama3_8b_pretrain_config", tmp_path / "bad.toml"
    bad.write_text("[parallelism]\ntensor_parallel_degree = 3\n[model]\nname = 'llama3'\nflavor = '8B'\n")
    for names in ((good, str(bad)), (str(bad), good)):
        answer = meshwright("check", *names, "--gpus", "32xH100", "--json")
        assert [one["ok"] for one in answer.json["files"]] == [name == good for name in names]
        assert (answer.code, answer.json["ok"]) == (1, False)
    assert "files" not in meshwright("check", good, "--gpus", "32xH100", "--json").json


TITAN = """[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
"""


def test_pods_of_another_framework_can_write_their_working_folder(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TITAN)
    words = ("launch", str(tmp_path / "titan.toml"), "--scheduler", "kubernetes", "--gpus", "4x8xH100")
    assert "an image that contains torchtitan" in meshwright(*words).err
    for kind in ("pytorchjob", "jobset"):
        (text,) = meshwright(*words, "--image", "site/titan:1", "--kind", kind, "--json").json["files"].values()
        _, made = yaml.safe_load_all(text)
        (pod, *_) = _pods(made)
        (container,) = pod["containers"]
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert "emptyDir" in volumes[mounts[container["workingDir"]]]
        config = container["command"][container["command"].index("--job.config_file") + 1]
        assert "configMap" in volumes[mounts[f"{container['workingDir']}/{config}"]]


def _pods(made: Any) -> Iterator[dict[str, Any]]:
    """Yield the pods of a manifest."""
    if isinstance(made, dict):
        if "containers" in made:
            yield made
        for part in made.values():
            yield from _pods(part)
    elif isinstance(made, list):
        for part in made:
            yield from _pods(part)


def test_an_engine_claims_no_format_schedule_or_optimizer_that_its_files_cannot_say() -> None:
    """The Trainer of fsdp1 and deepspeed takes optimizers and schedules from the user's program, so files lack them."""
    on, fields = cluster("8xB200"), recipe_fields()
    for engine in ("megatron", "torchtitan", "automodel", "kempnerforge"):
        recipe = planner.with_engine_strategy(index.load("llama3_8b_pretrain_config"), engine)
        for key in ("precision.matmul", "schedule.name", "optimizer.name"):
            for value in get_args(bare_type(fields[key].type)[0]):
                changed, _ = overrides.change(recipe, {key: value})
                written = exported_for(engine, changed, models.find(recipe.model), on)
                lost = key in {one.field for one in written.unmapped}
                assert (engine in engines_with(fields[key].flat, value)) is not lost, (engine, key, value)


def test_a_format_that_torchtitan_lacks_is_an_error_in_every_answer(meshwright: Any) -> None:
    words = ("--engine", "torchtitan", "--gpus", "8xB200", "precision.matmul=nvfp4", "--json")
    for verb in ("check", "estimate"):
        answer = meshwright(verb, "llama3_8b_pretrain_config", *words)
        errors = {one["rule"] for one in answer.json["findings"] if one["severity"] == "error"}
        assert (answer.code, "precision.format-supported" in errors) == (1, True)
    assert meshwright("recommend", "llama3-8b", "--goal", "pretrain", *words).code == 1


def test_files_of_one_shape_are_compared_whatever_they_call_it(meshwright: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 30, "num_attention_heads": 32}
    shape = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 32000, **sizes}
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(shape))
    model, files = str(tmp_path / "ours" / "config.json"), []
    for engine, to, suffix in (("megatron", "megatron-lm", ".sh"), ("torchtitan", "torchtitan", ".toml")):
        saved, out = str(tmp_path / f"{to}.toml"), tmp_path / to
        meshwright("recommend", model, "--gpus", "32xH100", "--goal", "pretrain", "--engine", engine, "--save", saved)
        meshwright("export", saved, "--to", to, "--gpus", "32xH100", "--out", str(out), "train.steps=100")
        files += [str(one) for one in out.iterdir() if one.suffix == suffix]
    assert "Use " in meshwright("compare", *files, "--gpus", "32xH100", "--json").json["answer"]
    other = meshwright("compare", "llama2-7b", "llama3-8b", "--gpus", "32xH100", "--goal", "pretrain", "--json")
    assert "different models" in other.json["answer"]
