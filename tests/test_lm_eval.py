"""EleutherAI's lm-evaluation-harness against the server: what it reports is what the model says."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.model import forward
from dasc_jax.tokenizer import write_byte_tokenizer
from tests.fake_engine import serving
from tests.tiny import tiny_engine, tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is missing: pip install 'dasc-jax[lm-eval]'",
)

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " a kind of cheese"], "gold": 0},
    {"question": "Two and two make", "choices": [" five", " four", " many"], "gold": 1},
    {
        "question": "The quick brown fox jumps over the lazy" * 3,
        "choices": [" dog", "x"],
        "gold": 0,
    },
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: gold
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both tasks, their data and the tokenizer of the model."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    (folder / "tokenizer").mkdir()
    write_byte_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    engine = tiny_engine(max_context=512, prefill_tokens=128)
    with serving(engine.start()) as url:
        yield engine, url


def samples(
    folder: Path, model: str, url: str, task: str, *options: str, batch: int = 1
) -> list[dict]:
    """What the harness logs for each question, in order."""
    out = folder / f"{model}-{task}-{batch}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", task]
    command += ["--model_args", f"model=tiny,base_url={url},{','.join(options)}"]
    command += [
        "--batch_size",
        str(batch),
        "--include_path",
        str(folder),
        "--output_path",
        str(out),
        "--log_samples",
    ]
    command += ["--apply_chat_template"] * ("chat" in model)
    environment = {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = out.rglob(f"samples_{task}*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def loglikelihood(context: str, choice: str) -> tuple[float, bool]:
    tokens = np.frombuffer((context + choice).encode(), np.uint8).astype(np.int32)
    logits, _ = forward(tiny_model(), np.pad(tokens, (0, 192 - len(tokens)))[None])
    rows = np.arange(len(context.encode()) - 1, len(tokens) - 1)
    logprobs = np.asarray(jax.nn.log_softmax(logits[0, rows]))
    targets = tokens[rows + 1]
    scores = logprobs[np.arange(len(rows)), targets]
    return float(scores.sum()), bool((logprobs.argmax(-1) == targets).all())


@pytest.mark.parametrize("batch", [1, 3])
def test_loglikelihoods_are_those_of_the_model(tasks, served, batch):
    _, url = served
    options = (f"tokenizer={tasks / 'tokenizer'}", "tokenizer_backend=huggingface")
    options += ("num_concurrent=1", "max_length=512")
    url = f"{url}/v1/completions"
    rows = samples(tasks, "local-completions", url, "tiny_choice", *options, batch=batch)
    assert len(rows) == len(QUESTIONS)
    for row, question in zip(rows, QUESTIONS, strict=True):
        expected = [loglikelihood(question["question"], choice) for choice in question["choices"]]
        found = row["filtered_resps"]
        assert [float(score) for score, _ in found] == pytest.approx([s for s, _ in expected])
        assert [greedy in (True, "True") for _, greedy in found] == [g for _, g in expected]
        best = int(np.argmax([score for score, _ in expected]))
        assert row["acc"] == float(best == question["gold"])


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_generations_are_those_of_the_engine(tasks, served, model):
    engine, url = served
    chat = "chat" in model
    path = "/v1/chat/completions" if chat else "/v1/completions"
    options = (
        f"tokenizer={tasks / 'tokenizer'}",
        "tokenizer_backend=huggingface",
        "max_length=512",
    )
    options = ("num_concurrent=2",) if chat else options
    rows = samples(tasks, model, url + path, "tiny_generate", *options)
    tokenizer = engine.model.tokenizer
    for row, question in zip(rows, QUESTIONS, strict=True):
        text = question["question"]
        if chat:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        request = Request("direct", tuple(tokenizer.encode(text)), SamplingParams(8))
        (result,) = engine.generate([request])
        whole = tokenizer.decode(list(result.tokens), skip_special_tokens=True)
        assert row["filtered_resps"] == [whole.split("zz")[0]]
