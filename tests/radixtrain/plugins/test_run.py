"""`radixtrain run -- COMMAND`: a program that knows nothing of radixtrain shares, and trains the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import FSMTConfig, FSMTModel, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

import radixtrain
from radixtrain.__main__ import main
from radixtrain.commands.run import NOTHING_LOADED
from radixtrain.plugins.from_pretrained import LoadedModel, _share
from tests.support import FULL, cases

PROGRAM = """\
import os, sys
import torch
from transformers import AutoModelForCausalLM

torch.manual_seed(int(os.environ.get("RANK", 0)))
prompt = torch.randint(1, 60, (1, 40))
batches = torch.cat([prompt.expand(4, -1), torch.randint(1, 60, (4, 6))], dim=1), torch.randint(1, 60, (4, 46))
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in (*batches, *batches):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(path, loss.item(), flush=True)
AutoModelForCausalLM.from_pretrained(sys.argv[1])
sys.exit(7)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen3 that can be shared, a Llama with attention dropout that cannot, and the program."""
    folder = tmp_path_factory.mktemp("run")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3ForCausalLM.config_class(**sizes, **heads)).save_pretrained(folder / "qwen")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1)).save_pretrained(folder / "llama")
    (folder / "train.py").write_text(PROGRAM)
    return folder


def started(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
    )


IS_ON = "import sys; print(any(type(each).__module__.startswith('radixtrain') for each in sys.meta_path))"
PTH = f"exec(open({str(Path(radixtrain.__file__).parent / 'plugins' / 'radixtrain-run.pth')!r}).read())"


@pytest.mark.parametrize(
    ("values", "is_on", "said"),
    [
        (("1", "true", "True", "YES", "on"), "True", ""),
        (("", "0", "false", "False", "no", "off", " OFF "), "False", ""),
        (("/opt/radixtrain", "2", "none", "-1"), "False", "no model is shared; set it to 1 to share, or to 0"),
    ],
)
def test_only_words_that_say_so_turn_it_on(values: tuple[str, ...], is_on: str, said: str, tmp_path: Path) -> None:
    for value in values:
        done = started(tmp_path, "-c", f"{PTH}; {IS_ON}", RADIXTRAIN=value)
        lines = {
            line for line in done.stderr.splitlines() if value and line.startswith(f"radixtrain: RADIXTRAIN={value}")
        }
        assert done.stdout.strip() == is_on, (value, done.stderr)
        assert len(lines) == bool(said) and all(line.endswith(said) for line in lines), (value, done.stderr)


def losses(printed: str, path: str) -> torch.Tensor:
    lines = (line.split() for line in printed.splitlines())
    return torch.tensor([float(loss) for name, loss in lines if name == path], dtype=torch.float64)


RUN = ("-m", "radixtrain", "run")


def test_a_program_shares_and_trains_the_same(folder):
    ordinary = started(folder, "train.py", "qwen", "llama")
    shared = started(folder, *RUN, "--", sys.executable, "train.py", "qwen", "llama")
    assert ordinary.returncode == shared.returncode == 7, shared.stderr
    assert len(losses(ordinary.stdout, "qwen")) == 4
    rounding = 8 * torch.finfo(torch.float32).eps  # the dtype of Qwen3's norms and loss, in a float64 model too
    torch.testing.assert_close(losses(shared.stdout, "qwen"), losses(ordinary.stdout, "qwen"), rtol=rounding, atol=0)
    first, second, third = shared.stderr.splitlines()[-3:]
    tokens = 2 * 4 * 46 / (2 * (40 + 4 * 6))
    assert first == (
        f"radixtrain: Qwen3ForCausalLM of qwen: r = {tokens:.2f}, 2 of 4 calls shared; "
        "2 not: less than min_ratio = 1.1 to save"
    )
    assert second.startswith("radixtrain: LlamaForCausalLM of llama: not shared: ") and "attention_dropout" in second
    assert third == "radixtrain: Qwen3ForCausalLM of qwen (2): its forward pass was not called"
    assert "radixtrain" not in ordinary.stderr


def test_one_model_by_the_environment_with_options(folder):
    """Without the launcher each process prints what it shared."""
    options = {"only": ["qwen"], "min_ratio": 100}
    done = started(folder, "train.py", "qwen", "llama", RADIXTRAIN="1", RADIXTRAIN_OPTIONS=json.dumps(options))
    assert done.returncode == 7
    lines = [line for line in done.stderr.splitlines() if line.startswith("radixtrain")]
    assert lines == [
        "radixtrain: Qwen3ForCausalLM of qwen: none of 4 calls shared; 4 not: less than min_ratio = 100 to save",
        "radixtrain: Qwen3ForCausalLM of qwen (2): its forward pass was not called",
    ]


THREADS = """\
import threading, torch
from transformers import Qwen3ForCausalLM

class Slow(Qwen3ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        together.wait()

def load():
    model = Slow.from_pretrained("qwen")
    model(torch.ones(4, 8, dtype=torch.int64), use_cache=False)

together = threading.Barrier(3, timeout=600)
threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_three_threads_that_load_a_model(folder):
    (folder / "threads.py").write_text(THREADS)
    done = started(folder, "threads.py", RADIXTRAIN="1")
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("radixtrain"))
    names = [f"radixtrain: Slow of qwen{number}: r = 4.00, 1 of 1 calls shared" for number in (" (2)", " (3)", "")]
    assert lines == names and done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", ["{only", "[1]", '{"only": 5}', '{"reports": 5}', '{"min_ratio": "x"}', '{"x": 1}'])
def test_options_that_are_wrong_break_no_import(folder, options):
    done = started(folder, "train.py", "qwen", RADIXTRAIN="1", RADIXTRAIN_OPTIONS=options)
    assert done.returncode == 7 and "Traceback" not in done.stderr, done.stderr
    assert "radixtrain: Qwen3ForCausalLM of qwen: not shared: " in done.stderr


LAUNCHED = """\
import json, sys, torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from radixtrain.verification.oracle import float64_arithmetic

own = PartialState.__init__
def init(state, *args, **others):
    own(state, *args, **others)
    if state.distributed_type == DistributedType.MULTI_CPU:  # Accelerate shards only where it finds accelerators
        state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
if "sharded" in sys.argv:
    PartialState.__init__ = init

torch.manual_seed(0)
ids = torch.cat([torch.randint(1, 60, (1, 40)).expand(24, -1), torch.randint(1, 60, (24, 6))], dim=1)
settings = TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
                             save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True)
model = AutoModelForCausalLM.from_pretrained("qwen", dtype=torch.float64)
trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
with float64_arithmetic():
    trainer.train()
if settings.process_index == 0:
    steps = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    print("logged", str(trainer.accelerator.distributed_type), json.dumps(steps))
trainer.accelerator.end_training()  # an interpreter that ends with gloo's threads may abort
"""
FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  fsdp_cpu_ram_efficient_loading: true
"""
TORCHRUN = "torch.distributed.run --nproc_per_node 2 launched.py"
ACCELERATE = "accelerate.commands.launch"
LAUNCHERS = {
    TORCHRUN: "MULTI_CPU",
    f"{ACCELERATE} --multi_gpu --num_processes 2 launched.py": "MULTI_CPU",
    f"{ACCELERATE} --config_file fsdp2.yaml launched.py sharded": "FSDP",
}


@FULL
def test_what_launchers_start_shares(folder):
    """Two ranks are one line, and they train as without: with DistributedDataParallel, and with FSDP2 by a file."""
    (folder / "launched.py").write_text(LAUNCHED)
    (folder / "fsdp2.yaml").write_text(FSDP2)

    def logged(*words: str) -> tuple[str, torch.Tensor, str]:
        done = started(folder, *words, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("logged"))
        _, kind, steps = line.split(maxsplit=2)
        return kind, torch.tensor(json.loads(steps), dtype=torch.float64), done.stderr

    _, ordinary, _ = logged("-m", *TORCHRUN.split())
    for launcher, expected in LAUNCHERS.items():
        kind, shared, printed = logged(*RUN, "--min-ratio", "1.5", "--", sys.executable, "-m", *launcher.split())
        assert kind == f"DistributedType.{expected}"
        assert "radixtrain: Qwen3ForCausalLM of qwen on 2 processes: r = 2.88, 6 of 6 calls shared" in printed
        torch.testing.assert_close(shared, ordinary, rtol=1e-10, atol=0)


LORA = """\
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
model = get_peft_model(AutoModelForCausalLM.from_pretrained("qwen"), adapter)
ids = torch.ones(4, 20, dtype=torch.long)
model.train()(input_ids=ids, labels=ids).loss.backward()
"""


@pytest.mark.parametrize(
    ("options", "line"),
    cases(
        [
            ((), "none of 1 calls shared; 1 not: Qwen3Model draws at random"),
            (("--allow-dropout", "lora_dropout"), "1 of 1 calls"),
        ],
        [((), "none of 1 calls shared; 1 not: Qwen3Model draws at random")],
    ),
)
def test_a_call_that_would_be_refused_runs_as_it_is(folder, options, line):
    """The adapter comes after `from_pretrained`, and its author did not ask for sharing."""
    (folder / "lora.py").write_text(LORA)
    done = started(folder, *RUN, *options, "--", sys.executable, "lora.py")
    assert done.returncode == 0, done.stderr
    assert line in done.stderr.splitlines()[-1]


SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1}
FSMT = {"src_vocab_size": 50, "tgt_vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}


class Broken(torch.nn.Module):
    def get_base_model(self) -> None:
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: FSMTModel(FSMTConfig(**FSMT)), "FSMTModel is not a plain decoder, but an encoder and a decoder"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)), "has attention_dropout=0.1"),
        (Broken, "ZeroDivisionError('division by zero')"),
    ],
)
def test_a_model_that_cannot_be_shared_is_loaded_all_the_same(model, reason):
    entry, report = _share(model(), "a model", {})
    assert report is None and reason in entry.reason


def test_a_command_that_loads_no_model(capfd):
    assert main(["run", "--", sys.executable, "-c", "print('ordinary')"]) == 0
    printed = capfd.readouterr()
    assert printed.out == "ordinary\n" and printed.err == f"{NOTHING_LOADED}\n"


def test_mistakes_are_one_line(capsys):
    assert main(["run", "--", "no-such-program", "--x"]) == 2
    assert capsys.readouterr().err == (
        "error: radixtrain run: no command 'no-such-program'; after -- write what you would type without it\n"
    )
    assert main(["run", "--min-ratio", "high", "--", "true"]) == 2
    assert "argument --min-ratio: invalid float value: 'high'" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_a_signal_reaches_the_command(tmp_path):
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, *RUN, "--", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "up\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 9
    process.stdout.close()


def test_the_same_model_of_two_processes_adds_up():
    report = {"num_shared": 2, "num_tokens": 90, "num_unique_tokens": 30, "num_generating": 0}
    report["not_shared"] = {"a cache": 1}
    model = LoadedModel("Llama of x", report=report)
    model.add(
        LoadedModel("Llama of x", report={**report, "not_shared": {"a cache": 2, "a hole": 4}, "num_generating": 5})
    )
    assert str(model) == (
        "radixtrain: Llama of x on 2 processes: r = 3.00, 4 of 11 calls shared; 4 not: a hole; 3 not: a cache; "
        "5 calls of generation"
    )
    idle = LoadedModel("Llama of x", report={**report, "num_shared": 0, "not_shared": {}, "num_generating": 7})
    assert str(idle) == "radixtrain: Llama of x: only 7 calls of generation"
