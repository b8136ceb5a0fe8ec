"""From an error message to its fix: messages of the frameworks, in tracebacks as terminals and logs show them."""

from __future__ import annotations

import re
from itertools import cycle
from typing import Any

import pytest

from meshwright import rules
from meshwright.doctor import meanings
from meshwright.rules import messages
from meshwright.rules.messages import codes

IB_STATUS = {5: "error.ib-flushed", 10: "error.ib-access", 12: "error.ib-retries", 13: "error.ib-not-ready"}
NUMBERS = ("7", "129", "4096", "12", "3", "65,536", "0.25")
LIBRARY = "/opt/conda/lib/python3.12/site-packages"

TRACEBACKS = (
    "{error}: {text}",
    '[rank{n}]: Traceback (most recent call last):\n[rank{n}]:   File "/home/me/run-{n}/train.py", line {n}, in main\n'
    "[rank{n}]:     main()\n[rank{n}]:     ^^^^^^\n[rank{n}]: {error}: {text}",
    'Traceback (most recent call last):\n  File "{lib}/megatron/training/training.py", line 1{n}, in pretrain\n'
    "    initialize_megatron(\n{error}: {text}\n\nDuring handling of the above exception, another exception occurred:\n"
    "E1116 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: {n} (pid: 9{n})",
    "{n}: 2026-11-10 10:00:0{n},123 - root - INFO - Starting job: Llama 3 8B training\n{n}: {error}: {text}\n"
    "{n}: E1116 torch/distributed/elastic/agent.py:{n}] worker group failed",
    "(RayTrainWorker pid=41{n}) [rank{n}]: {error}: {text}",
    "│ {lib}/deepspeed/runtime/config.py:{n} in _batch_assertion │\n╰────────╯\n{error}: {wrapped}",
)
ORDINARY = (
    "step 10/100  loss 10.9312  lr 3.0e-05  grad norm 1.20  tokens/s/GPU 5,600  MFU 29%",
    "The global batch size is 512 and every rank trains on 4 samples.",
    "using world size: 32, data-parallel size: 2, tensor-model-parallel size: 8, pipeline-model-parallel size: 2",
    "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1",
    "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory",
    "Saving the checkpoint (or staging if async is enabled).",
    "we divide the batch by the number of ranks and shard the optimizer state",
    "WARNING: Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "Some weights of LlamaForCausalLM were not initialized from the model checkpoint",
    "torch.compile is enabled for the model with backend inductor",
    "the attention heads of this model are split over the tensor-parallel ranks",
    "NCCL version 2.27.5+cuda12.9",
    "Please cite our paper if you use this code in your research",
    "ValueError: the truth value of an array with more than one element is ambiguous",
    "KeyError: 'labels'",
    "ModuleNotFoundError: No module named 'apex'",
    "TypeError: forward() got an unexpected keyword argument 'cache_position'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.jsonl'",
    "ZeroDivisionError: division by zero",
    "AssertionError: the reward model must be frozen before generation",
)
"""Log lines, prose, and errors that are not about parallelism: none is a known message."""
OTHER_WORDING = {
    "15: [rank15]:     num_layers % config.pipeline_model_parallel_size == 0\n15: [rank15]: AssertionError: num_layers "
    "should be divisible by pipeline_model_parallel_size": "pipeline.even-split",
    "(Worker_3 pid=3585) ERROR 12-08 18:21:31 [core.py:844] ValueError: Cannot flatten integer dtype tensors": (
        "error.integer-weights"
    ),
    "../aten/src/ATen/native/cuda/IndexKernel.cu:92: operator(): block: [22,0,0], thread: [64,0,0] Assertion "
    '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.': "error.index-out-of-range",
    "[ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32]": (
        "error.mixed-dtypes"
    ),
    "ValueError: num_attention_heads (28) must be a multiple of tensor_model_parallel_size (8).": "heads.attention",
    "AssertionError: number of layers should be divisible by the pipeline-model-parallel size": "pipeline.even-split",
    "assert: world size (6) is not divisible by total_model_size (encoder_model_size=0 + decoder_model_size=8)": (
        "topology.world"
    ),
    "AssertionError: Invalid parallel dims: dp_replicate(1) * dp_shard(4) * cp(1) * tp(4) * pp(1) != WORLD_SIZE(8)": (
        "topology.shard-product"
    ),
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity)": (
        "memory.peak"
    ),
    "global batch size (100) is not divisible by micro batch size (8) times data parallel size (4)": "batch.divides",
    "[rank3]:[E424 01:11:21.160815008 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds "
    "before timing out.": "run.failed-hang",
    "AssertionError: Check batch related parameters. train_batch_size is not\nequal to micro_batch_per_gpu * "
    "gradient_acc_step * world_size 64 != 4 *\n8 * 1": "batch.divides",
    "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for model.embed_tokens.weight:"
    " copying a param with shape torch.Size([128256, 4096]) from checkpoint, the shape in current model is "
    "torch.Size([128264, 4096]).": "error.checkpoint-shapes",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
    "29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use": "error.port-in-use",
}


def _example(message: messages.Message, style: str, values: Any) -> str:
    text = re.sub(r"\{[^{}]*\}", lambda _: next(values), message.text)
    half = text.rfind(" ", 0, max(20, len(text) // 2))
    wrapped = f"{text[:half]}\n{text[half + 1 :]}" if half > 0 else text
    fields = {"{text}": text, "{wrapped}": wrapped, "{error}": "AssertionError", "{lib}": LIBRARY, "{n}": "3"}
    for name, value in fields.items():
        style = style.replace(name, value)
    return style


def test_every_message_names_its_source_and_what_explains_it() -> None:
    known = {*rules.all_rules(), *meanings(), *messages.KNOWN_ERRORS}
    table = messages.all_messages()
    assert len(table) >= 200
    assert [one for one in table if not set(one.ids) <= known] == []
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+ \S+\.\w+", one.source) for one in table)
    assert len({one.text for one in table}) == len(table)
    reached = {id for one in table for id in one.ids if id.startswith("error.")}
    by_code = {*(f"error.xid-{number}" for number in codes.XIDS), *IB_STATUS.values()}
    assert set(messages.KNOWN_ERRORS) == reached | by_code


def test_precision_and_recall_in_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    """Every message in every kind of traceback, with other numbers; and texts that are no known message."""
    values, found, right, asked = cycle(NUMBERS), 0, 0, 0
    for place, message in enumerate(messages.all_messages()):
        for style in TRACEBACKS[place % 2 :: 2]:
            asked += 1
            best = next((one for one in messages.search(_example(message, style, values)) if one.sure), None)
            found += best is not None
            right += best is not None and best.message.ids == message.ids
    alarms = [text for text in ORDINARY if any(one.sure for one in messages.search(text))]
    precision, recall = right / (found + len(alarms)), right / asked
    with capsys.disabled():
        print(f"\nerror messages: {asked} tracebacks, precision {precision:.3f}, recall {recall:.3f}")
    assert alarms == []
    assert precision >= 0.97
    assert recall >= 0.97


@pytest.mark.parametrize("text", OTHER_WORDING)
def test_messages_as_users_paste_them(meshwright: Any, text: str) -> None:
    answer = meshwright("explain", text, "--json").json
    assert answer["kind"] == "message"
    assert answer["matches"][0]["name"] == OTHER_WORDING[text]
    assert answer["matches"][0]["meaning"]
    assert answer["matches"][0]["source"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Xid 79", "error.xid-79"),
        ("NVRM: Xid (PCI:0000:1b:00): 63, pid=1, Row Remapper: New row marked for remapping", "error.xid-63"),
        ("[Mon Nov 16 10:00:00 2026] NVRM: Xid (PCI:0000:9a:00): 94, pid='<unknown>', Contained", "error.xid-94"),
        ("XID error 48", "error.xid-48"),
        ("NVLink error", "error.xid-74"),
        ("NVRM: GPU at 0000:06:00.0: GPU has fallen off the bus.", "error.xid-79"),
        ("ncclSystemError", "error.nccl-system"),
        ("ncclRemoteError", "error.nccl-remote"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", "error.nccl-cuda"),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
            "error.nccl-system",
        ),
        ("node3:41:77 [3] ibvwrap.cc:360 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
         "error.infiniband-setup"),
        ("node3:41:77 [3] misc/ibvwrap.cc:376 NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev",
         "error.infiniband-setup"),
        ("NCCL WARN socketProgress: Connection closed by remote peer node07<41234>", "error.peer-closed"),
        ("NET/IB: Got completion from peer 10.0.0.1<34> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
         "vendor_err=129", "error.ib-retries"),
        ("NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129", "error.ib-retries"),
        ("NET/IB : Got completion from peer 10.0.0.1<34> with status=5 opcode=0 len=0 vendor err 249",
         "error.ib-flushed"),
    ],
)  # fmt: skip
def test_messages_of_nccl_and_the_driver(meshwright: Any, line: str, name: str) -> None:
    answer = meshwright("explain", line, "--json").json
    assert (answer["kind"], answer["matches"][0]["name"]) == ("message", name)
    assert answer["matches"][0]["fix"]


def test_codes_that_are_none() -> None:
    for line in ("SXid (PCI:0000:05:00.0): 24001", "Got completion for a send request", "the taxid 79 of the row"):
        assert not messages.has_code(line)
    assert messages.search("Xid 57")[0].message.ids == ("run.failed-gpu-fault",)  # a number without an entry


def test_the_doctor_names_the_cause_of_a_lost_peer(meshwright: Any, tmp_path: Any) -> None:
    log = tmp_path / "train.log"
    steps = "".join(
        f"step {n}/100  loss {3 - n / 50:.2f}  lr 3.0e-05  grad norm 1.20  tokens/s/GPU 5,600\n" for n in range(1, 40)
    )
    warned = "node3:41:77 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<34> with status=12 opcode=0 len=0 "
    log.write_text(f"{steps}{warned}vendor err 129\nTraceback (most recent call last):\nRuntimeError: stopped\n")
    (finding,) = [f for f in meshwright("doctor", str(log), "--json").json["findings"] if f["severity"] == "error"]
    assert finding["rule"] == "run.failed-network"
    assert "status 12" in finding["message"]
    assert any("ended first" in " ".join(one["try"]) for one in finding["remedies"])


def test_explain_a_message(meshwright: Any) -> None:
    answer = meshwright("explain", "CUDA graph accepts only Tensor inputs", "--json").json
    (best,) = answer["matches"]
    assert (answer["kind"], best["name"], best["kind"], best["score"]) == ("message", "graphs.packing", "rule", 1.0)
    assert best["source"] == "NVIDIA/Megatron-LM megatron/core/transformer/module.py"
    assert "data.packing=false" in best["fix"]
    assert [rule["id"] for rule in answer["rules"]] == ["graphs.packing"]
    shown = meshwright("explain", "CUDA", "graph", "accepts", "only", "Tensor", "inputs").out  # without quotes
    assert "graphs.packing" in shown
    assert "data.packing=false" in shown


def test_a_rule_lists_its_messages(meshwright: Any) -> None:
    (rule,) = meshwright("explain", "heads.kv-groups", "--json").json["rules"]
    assert any("num_query_groups" in one["text"] and "Megatron-LM" in one["source"] for one in rule["messages"])


def test_an_unknown_message_is_not_guessed(meshwright: Any) -> None:
    answer = meshwright("explain", "AssertionError: the reward model must be frozen before generation", "--json")
    assert answer.code == 2
    assert "no known error message" in answer.json["error"]["message"]
    text = "AssertionError: num_audio_heads (6) must be a multiple of tensor_model_parallel_size (4)"
    near = meshwright("explain", text, "--json")
    assert near.code == 2
    assert "meshwright explain heads.attention" in near.json["error"]["fix"]


ARGUMENTS = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "group_query_attention": True,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "global_batch_size": 510,
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": True,
    "world_size": 32,
    "bf16": True,
    "use_distributed_optimizer": True,
    "lr": 0.00015,
    "padded_vocab_size": 128256,
    "swiglu": True,
}


def _megatron_log(error: str, **changed: object) -> str:
    """Return the log of a Megatron run that dies before its first step, on two ranks and under torchrun."""
    dump = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in {**ARGUMENTS, **changed}.items())
    ranks = "".join(
        f'[rank{n}]: Traceback (most recent call last):\n[rank{n}]:   File "/opt/megatron-lm/pretrain_gpt.py", line 3\n'
        f"[rank{n}]: {error}\n"
        for n in (0, 1)
    )
    return (
        f"------------------------ arguments ------------------------\n{dump}"
        f"-------------------- end of arguments ---------------------\n{ranks}"
        "E1116 10:00:00.1 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0\n"
        "Traceback (most recent call last):\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )


BATCH = "AssertionError: global batch size (510) is not divisible by micro batch size (1) times data parallel size (4)"


def test_doctor_on_a_run_that_dies_before_its_first_step(meshwright: Any, tmp_path: Any) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(_megatron_log(BATCH))
    answer = meshwright("doctor", str(log), "--gpus", "4x8xH100", "--json")
    (finding,) = answer.json["findings"]
    assert answer.code == 1
    assert finding["rule"] == "batch.divides"
    assert finding["rule"] == meshwright("explain", BATCH, "--json").json["matches"][0]["name"]
    line = log.read_text().splitlines().index(f"[rank0]: {BATCH}") + 1
    assert finding["lines"] == [f"{log}:{line} [rank0]: {BATCH}"]
    also = next(one for one in finding["evidence"] if one["name"] == "the settings also break")
    assert also["value"].startswith("memory.")  # 70B with tp=8 and pp=1 would run out of memory next
    first = finding["remedies"][0]
    batch = int(first["try"][0].removeprefix("train.global_batch_size="))
    assert batch % 4 == 0  # tried: it divides, and tp stays inside a node
    assert first["there"] == [f"--global-batch-size {batch}"]
    assert f"{log}:{line}" in meshwright("doctor", str(log)).out


def test_doctor_without_arguments_gives_the_rules_fixes(meshwright: Any, tmp_path: Any) -> None:
    log = tmp_path / "crash.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "t.py", line 1\n'
        "AssertionError: CUDA graph accepts only Tensor inputs.\n"
    )
    (finding,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert (finding["rule"], finding["fix"]) == ("graphs.packing", ["data.pad_to_max_length=true"])
    assert finding["lines"] == [f"{log}:3 AssertionError: CUDA graph accepts only Tensor inputs."]


def test_doctor_names_an_error_of_the_environment(meshwright: Any, tmp_path: Any) -> None:
    log = tmp_path / "crash.log"
    log.write_text(
        "loading\nRuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
        "installed a driver from http://www.nvidia.com/Download/index.aspx\n"
    )
    (finding,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert finding["rule"] == "error.no-gpu"
    assert any("nvidia-smi" in step for remedy in finding["remedies"] for step in remedy["try"])


def test_doctor_says_that_a_message_is_not_known(meshwright: Any, tmp_path: Any) -> None:
    error = "AssertionError: num_audio_heads (6) must be a multiple of tensor_model_parallel_size (4)"
    plain = tmp_path / "plain.log"
    plain.write_text(f"Traceback (most recent call last):\n{error}\n")
    refused = meshwright("doctor", str(plain), "--json")
    assert refused.code == 2
    assert "is not a known message" in refused.json["error"]["message"]
    assert "heads.attention" in refused.json["error"]["message"]
    log = tmp_path / "megatron.log"
    log.write_text(_megatron_log(error, global_batch_size=512))
    (finding,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert finding["rule"] == "run.failed-error"
    assert ["meshwright explain heads.attention"] in [remedy["try"] for remedy in finding["remedies"]]


def test_a_known_message_in_an_earlier_start_is_not_why_a_run_ended(meshwright: Any, tmp_path: Any) -> None:
    steps = "".join(
        f"[titan] 2026-11-10 10:00:{n:02d},000 - step: {n}  loss: 5.0  memory: 50.00GiB(60%)  tps: 5,60{n % 3}\n"
        for n in range(1, 40)
    )
    log = tmp_path / "titan.log"
    log.write_text("Traceback (most recent call last):\nValueError: CUDA graph accepts only Tensor inputs.\n" + steps)
    assert meshwright("doctor", str(log), "--json").json["findings"] == []


@pytest.mark.parametrize(
    ("error", "rule", "works"),
    [
        ("tensor_parallel_degree (3) must divide n_heads (32).", "heads.attention", "layout.tp=4"),
        (
            "Invalid parallel dims: dp_replicate(1) * dp_shard(4) * cp(1) * tp(4) * pp(1) != WORLD_SIZE(8)",
            "topology.shard-product",
            "layout.dp_shard=-1",
        ),
    ],
)
def test_the_values_in_a_message_are_the_runs(
    meshwright: Any, tmp_path: Any, error: str, rule: str, works: str
) -> None:
    """The recipe has tp=2: the fix is tried on the degrees that the message states."""
    log = tmp_path / "titan.log"
    log.write_text(
        f'Traceback (most recent call last):\n  File "/opt/torchtitan/train.py", line 3\nValueError: {error}\n'
    )
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
    (finding,) = answer["findings"]
    assert finding["rule"] == rule
    assert any(works in remedy["try"] for remedy in finding["remedies"])
    assert all(remedy["there"] for remedy in finding["remedies"])


def test_a_rule_that_the_recipe_does_not_break_is_said_so(meshwright: Any, tmp_path: Any) -> None:
    log = tmp_path / "crash.log"
    log.write_text("Traceback (most recent call last):\nAssertionError: CUDA graph accepts only Tensor inputs.\n")
    (finding,) = meshwright("doctor", str(log), "--recipe", "llama3-8b", "--gpus", "8xH100", "--json").json["findings"]
    assert "does not break this rule" in finding["message"]
    assert finding["remedies"]
