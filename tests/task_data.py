"""Small files in the published formats of the benchmarks, with made-up content."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MMLU_PRO = [
    {
        "question_id": 70 + i,
        "question": f"Which number is {word}?",
        "options": [str(n) for n in range(count)],
        "answer": "ABCDEFGHIJ"[i],
        "answer_index": i,
        "cot_content": "",
        "category": "math",
        "src": "made up",
    }
    for i, (word, count) in enumerate([("zero", 10), ("one", 4), ("two", 3)])
]
GPQA = [
    {
        "Record ID": f"rec{i}",
        "Question": f"What is {i} plus {i}, in words?",
        "Correct Answer": f"right {i}\n",
        **{f"Incorrect Answer {k}": f"wrong {i}.{k}" for k in (1, 2, 3)},
        "Subdomain": "Arithmetic",
        "High-level domain": "Mathematics",
    }
    for i in range(8)
]
AIME = [
    {"problem_idx": i, "problem": f"Find ${i}+40$.", "answer": i + 40, "problem_type": ["Algebra"]}
    for i in (1, 2)
]
HMMT = [
    {"problem_idx": 1, "problem": "Halve 1.", "answer": r"\frac{1}{2}"},
    {"problem_idx": 2, "problem": "Roots of $x^2=2$?", "answer": r"\sqrt{2}, -\sqrt{2}"},
]
IMO = [
    {
        "Problem ID": "imo-bench-algebra-001",
        "Problem": 'Find all "nice" $N$,\n\\[N^2 = N\\]\n',
        "Short Answer": "$0, 1$ ",
        "Category": "Algebra",
        "Level": "IMO-Easy",
        "Subcategory": "Equation",
        "Source": "made up",
    }
]
LOCOMO = [
    {
        "sample_id": "conv-1",
        "conversation": {
            "speaker_a": "Ann",
            "speaker_b": "Bo",
            "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "Bye!"}],
            "session_10_date_time": "9:00 am on 2 June, 2023",
            "session_2": [
                {"speaker": "Bo", "dia_id": "D2:1", "text": "I sold the boat."},
                {
                    "speaker": "Ann",
                    "dia_id": "D2:2",
                    "text": "Look!",
                    "img_url": ["http://nowhere/x.jpg"],
                    "blip_caption": "a photo of a kite",
                },
            ],
            "session_2_date_time": "1:56 pm on 8 May, 2023",
        },
        "qa": [
            {
                "question": "What was sold?",
                "answer": "The boat",
                "evidence": ["D2:1"],
                "category": 4,
            },
            {"question": "Which year?", "answer": 2023, "evidence": ["D2:1"], "category": 2},
            {
                "question": "Where does Bo live?",
                "adversarial_answer": "Rome",
                "evidence": [],
                "category": 5,
            },
        ],
        "event_summary": {},
        "observation": {},
        "session_summary": {},
    }
]


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_all(folder: Path) -> dict[str, Path]:
    """A file for each task, by task."""
    return {
        "mmlu_pro": write_jsonl(folder / "mmlu_pro.jsonl", MMLU_PRO),
        "gpqa": write_csv(folder / "gpqa_diamond.csv", GPQA),
        "aime": write_jsonl(folder / "aime.jsonl", AIME),
        "hmmt": write_json(folder / "hmmt.json", HMMT),
        "imo": write_csv(folder / "answerbench.csv", IMO),
        "locomo": write_json(folder / "locomo10.json", LOCOMO),
    }
