"""End tasks over HTTP: published files in, one line a generation and the right score out."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dasc_jax.evals.task_client import seed_of
from dasc_jax.evals.task_files import TaskFileError, load_questions, records
from dasc_jax.evals.task_results import TASKS, question_scores, read_generations, summarise
from dasc_jax.evals.tasks import main
from tests.fake_engine import EOS, FakeEngine, byte_tokenizer, serving
from tests.task_data import AIME, GPQA, MMLU_PRO, write_all, write_csv, write_json, write_jsonl
from tests.test_server_engine import served
from tests.tiny import tiny_engine

ANSWERS = {
    "number is zero": "Zero comes first. The answer is (A).",
    "number is one": "The answer is (C).",
    "number is two": "no idea",
    "1+40": r"It is \boxed{041}.",
    "2+40": r"\boxed{43}",
    "Halve": r"\boxed{0.5}",
    "Roots": r"\boxed{-\sqrt2, 2^{1/2}}",
    "nice": r"\boxed{\{1, 0\}}",
    "was sold": "a boat",
    "Which year": "in 2023",
    "Bo live": "It is not mentioned.",
}
EXPECTED = {
    "mmlu_pro": [1, 0, 0],
    "aime": [1, 0],
    "hmmt": [1, 1],
    "imo": [1],
    "locomo": [1, 2 / 3, 1],
}


class Scripted:
    """Answers by a phrase of the prompt; the tokens are those bytes and end of text."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def __call__(self, request, i: int) -> int:
        prompt = bytes(token for token in request.prompt if token < 256).decode()
        last = max(self.answers, key=prompt.rfind)
        return [*self.answers[last].encode(), EOS][i]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_all(tmp_path)


@pytest.fixture
def fake() -> Iterator[tuple[FakeEngine, str]]:
    options = {"tokenizer": byte_tokenizer(), "max_context": 8192, "limit": 4000, "slots": 16}
    engine = FakeEngine(Scripted(ANSWERS), **options)
    engine.model.config.max_context = 8192
    with serving(engine) as url:
        yield engine, url
    engine.stop()


def run(task: str, file: Path, url: str, out: Path, *options: str) -> int:
    return main(["--task", task, "--file", str(file), "--url", url, "--out", str(out), *options])


@pytest.mark.parametrize("task", list(EXPECTED))
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_each_task_scores_what_the_server_answers(task, api, files, fake, tmp_path, capsys):
    engine, url = fake
    out = tmp_path / "out.jsonl"
    assert run(task, files[task], url, out, "--api", api) == 0
    generations = read_generations(out)
    repeats = TASKS[task].repeats
    assert len(generations) == repeats * len(EXPECTED[task])
    scores = question_scores(sorted(generations, key=lambda g: g.question_id))
    assert list(scores.values()) == pytest.approx(EXPECTED[task])
    prompt, cached = (
        sum(getattr(g, f"{x}_tokens") for g in generations) for x in ("prompt", "cached")
    )
    summary = summarise(generations)
    assert summary.hit == cached / prompt and summary.score.n == len(EXPECTED[task])
    assert f"{summary.score.mean:.4f}" in capsys.readouterr().out
    sampled = {
        (r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in engine.requests
    }
    assert sampled == {(0.0 if task == "locomo" else 1.0, 1.0, 0)}
    assert {r.sampling.max_tokens for r in engine.requests} == {TASKS[task].max_tokens}
    assert sorted(r.sampling.seed for r in engine.requests) == sorted(g.seed for g in generations)


def test_the_paper_repeats_this_often():
    repeats = {name: task.repeats for name, task in TASKS.items()}
    assert repeats == {"mmlu_pro": 8, "gpqa": 16, "aime": 32, "hmmt": 32, "imo": 4, "locomo": 1}


def test_seeds_are_fixed_and_differ_by_question_and_try():
    assert seed_of("rec0", 0) == 632_215_569
    seeds = {seed_of(f"rec{q}", t) for q in range(50) for t in range(20)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**31 for seed in seeds)


def test_gpqa_options_are_shuffled_alike_in_every_run(files, fake, tmp_path):
    engine, url = fake
    questions = load_questions("gpqa", [files["gpqa"]])
    assert questions == load_questions("gpqa", [files["gpqa"]])
    assert len({question.reference for question in questions}) > 1
    for question, record in zip(questions, GPQA, strict=True):
        assert f"({question.reference}) {record['Correct Answer'].strip()}\n" in question.prompt
    right = {
        r["Question"]: f"The answer is ({q.reference})."
        for q, r in zip(questions, GPQA, strict=True)
    }
    engine.script = Scripted(right)
    out = tmp_path / "out.jsonl"
    assert run("gpqa", files["gpqa"], url, out, "--repeats", "2", "--sampling", "qwen") == 0
    assert {g.score for g in read_generations(out)} == {1.0}
    assert {r.sampling.top_k for r in engine.requests} == {20}


def test_the_problem_is_the_unit_and_its_generations_are_averaged(files, fake, tmp_path):
    engine, url = fake

    def even(request, i):
        return [*(rb"\boxed{41}" if request.sampling.seed % 2 else b"none"), EOS][i]

    engine.script = even
    out = tmp_path / "out.jsonl"
    assert run("aime", files["aime"], url, out, "--limit", "1") == 0
    summary = summarise(read_generations(out))
    odd = sum(seed_of("1", attempt) % 2 for attempt in range(32))
    assert 0 < odd < 32
    assert (summary.score.n, summary.generations) == (1, 32)
    assert summary.score.mean == pytest.approx(odd / 32)


def test_a_run_goes_on_where_it_stopped_and_mixes_with_no_other(files, fake, tmp_path, capsys):
    engine, url = fake
    out = tmp_path / "out.jsonl"
    assert run("aime", files["aime"], url, out, "--repeats", "3") == 0
    whole = read_generations(out)
    out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:4]))
    assert run("aime", files["aime"], url, out, "--repeats", "3") == 1
    assert "--resume keeps" in capsys.readouterr().err
    before = len(engine.requests)
    assert run("aime", files["aime"], url, out, "--repeats", "3", "--resume") == 0
    assert len(engine.requests) - before == 2
    scores = [(g.question_id, g.try_id, g.seed, g.text) for g in read_generations(out)]
    assert sorted(scores) == sorted((g.question_id, g.try_id, g.seed, g.text) for g in whole)
    other = ("--repeats", "3", "--resume", "--state-policy", "wr")
    assert run("aime", files["aime"], url, out, *other) == 1
    assert "holds another run" in capsys.readouterr().err


def test_a_refused_request_scores_nothing_and_is_counted(files, fake, tmp_path, capsys):
    _, url = fake
    out = tmp_path / "out.jsonl"
    options = ("--max-tokens", "9000", "--repeats", "1")
    assert run("hmmt", files["hmmt"], url, out, *options) == 1
    assert "the server refused every request: 400" in " ".join(capsys.readouterr().out.split())
    assert all(g.score == 0 and g.error for g in read_generations(out))


def test_no_server_or_a_failing_one_ends_the_run_with_its_reason(files, fake, tmp_path, capsys):
    engine, url = fake
    out = tmp_path / "out.jsonl"
    assert run("imo", files["imo"], "http://127.0.0.1:9", out) == 1
    assert "127.0.0.1:9/v1/models: ConnectError" in capsys.readouterr().err
    engine.fails = 0
    assert run("imo", files["imo"], url, out) == 1
    assert "failed with 500" in capsys.readouterr().err


def test_locomo_prompts_share_their_history_in_order(files):
    prompts = [question.prompt for question in load_questions("locomo", [files["locomo"]])]
    history, rest = prompts[0].split("\nAnswer the question")
    assert all(prompt.startswith(history) for prompt in prompts)
    order = ["Ann and Bo", "8 May", "Bo: I sold the boat.", "a photo of a kite", "2 June", "Bye!"]
    assert sorted(order, key=history.index) == order
    assert "What was sold?" in rest and "http" not in prompts[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.parquet", "PAR1", "is a parquet file; write it as .jsonl"),
        ("x.txt", "", "ends in '.txt'"),
        ("x.jsonl", "{", "no valid .jsonl file"),
        ("x.json", "[]", "holds no records"),
        ("x.csv", "", "holds no records"),
        ("x.json", "[1]", "holds no records"),
        ("x.json", '[{"problem": "p"}]', "record 0 has no 'problem_idx' or 'id'"),
        ("x.json", '[{"id": 1, "problem": "p", "answer": ""}]', "record 0 has no 'answer'"),
    ],
)
def test_a_file_of_another_format_is_refused_with_what_is_wrong(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskFileError, match=message):
        load_questions("aime", [tmp_path / name])


def test_formats_are_interchangeable_and_files_join(tmp_path):
    as_jsonl = write_jsonl(tmp_path / "I.jsonl", AIME)
    same = [write_json(tmp_path / "a.json", {"data": AIME}), write_csv(tmp_path / "b.csv", AIME)]
    expected = load_questions("aime", [as_jsonl])
    assert all(load_questions("aime", [path]) == expected for path in same)
    write_jsonl(tmp_path / "II.jsonl", AIME)
    joined = load_questions("aime", [as_jsonl, tmp_path / "II.jsonl"])
    assert [q.id for q in joined] == ["I/1", "I/2", "II/1", "II/2"]
    options = json.dumps(MMLU_PRO[0]["options"])
    path = write_csv(tmp_path / "m.csv", [{**MMLU_PRO[0], "options": options}])
    assert load_questions("mmlu_pro", [path])[0].choices == 10
    twice = write_jsonl(tmp_path / "twice.jsonl", [*AIME, AIME[0]])
    with pytest.raises(TaskFileError, match="more than once: 1"):
        load_questions("aime", [twice])
    assert len(records(twice)) == 3


def test_a_real_server_serves_repeats_from_its_cache(tmp_path):
    files = write_all(tmp_path)
    out = tmp_path / "out.jsonl"
    engine = tiny_engine(max_context=512, prefill_tokens=128)
    with served(engine) as (_, http):
        options = ("--api", "completions", "--repeats", "3", "--concurrency", "1")
        options += ("--max-tokens", "8", "--sampling", "greedy")
        assert run("mmlu_pro", files["mmlu_pro"], str(http.base_url), out, *options) == 0
    generations = read_generations(out)
    assert [g.cached_tokens > 0 for g in generations] == [False, True, True] * 3
    assert {g.reason for g in generations if g.cached_tokens} == {"hit"}
    assert all(g.completion_tokens <= 8 and g.prompt_tokens > 128 for g in generations)
