"""`dasc generate`: continue prompts without a server."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from dasc_jax.model import Model, generate
from dasc_jax.programs.loading import load, model_config
from dasc_jax.programs.runtime import EMBEDDED, FAILED, ProgramError, complain, complaints, settle


@dataclass(frozen=True)
class GenerateArgs:
    """Continue one prompt, or every line of a file, and print what the model makes of it.

    The continuation alone goes to standard output; progress and complaints go to standard error.
    The prompt is taken as it is: no chat template. For example,
    `dasc generate "The state remembers" --max-tokens 32`, or `dasc generate --prompts lines.txt
    --json`.
    """

    prompt: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")] = None
    """Text to continue."""
    token_ids: tuple[int, ...] = ()
    """Or: the prompt as token ids. The continuation is then printed as ids, too."""
    prompts: Path | None = None
    """Or: a UTF-8 file with a prompt a line."""
    model: Path = EMBEDDED
    """Checkpoint directory: as Hugging Face releases it, or from `dasc convert`. Default: the small
    trained model that comes with the repository."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations; recurrent states are float32 always."""
    max_tokens: int = 32
    """Tokens to generate at most; an end-of-sequence token ends a continuation earlier."""
    temperature: float = 0.0
    """0 takes the most likely token every time; higher values draw at random."""
    seed: int = 0
    """Of the random draws."""
    json: bool = False
    """Print one JSON object a prompt: prompt, text, token_ids."""
    compilation_cache: str = "auto"
    """Directory that keeps compiled steps for the next start. auto: $JAX_COMPILATION_CACHE_DIR,
    else one under ~/.cache; off: none."""


def main(argv: list[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(GenerateArgs, args=argv, prog="dasc generate")
    given = [args.prompt is not None, bool(args.token_ids), args.prompts is not None]
    if sum(given) != 1:
        complain("give one of PROMPT, --token-ids and --prompts")
        return 2
    try:
        with complaints():
            settle(args.compilation_cache)
            model_config(args.model)
            wanted = _wanted(args)
            model = load(args.model, args.dtype, Console(stderr=True))
            ids = [_encoded(prompt, model, args.max_tokens) for prompt in wanted]
            _continue(args, model, wanted, ids)
    except ProgramError:
        return FAILED
    except KeyboardInterrupt:
        return 130
    return 0


def _wanted(args: GenerateArgs) -> list[str | list[int]]:
    """The prompts, in order."""
    if args.prompts is not None:
        lines = [line for line in args.prompts.read_text().splitlines() if line]
        if not lines:
            raise ValueError(f"{args.prompts} holds no prompt")
        return list(lines)
    return [list(args.token_ids)] if args.prompt is None else [args.prompt]


def _encoded(prompt: str | list[int], model: Model, max_tokens: int) -> list[int]:
    """Token ids of a prompt, refused here where a later one would waste what ran before it."""
    if isinstance(prompt, list):
        ids = prompt
    elif model.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer: give the prompt as --token-ids")
    else:
        ids = list(model.tokenizer.encode(prompt))
    total, limit = len(ids) + max_tokens, model.config.max_context
    if total > limit:
        raise ValueError(
            f"{len(ids)} prompt tokens and max-tokens {max_tokens} make {total};"
            f" the context is {limit}"
        )
    return ids


def _continue(
    args: GenerateArgs, model: Model, wanted: list[str | list[int]], ids: list[list[int]]
) -> None:
    for prompt, encoded in zip(wanted, ids, strict=True):
        tokens = generate(model, encoded, args.max_tokens, args.temperature, args.seed)
        text = _text(tokens, model)
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "token_ids": tokens}), flush=True)
        elif isinstance(prompt, list) or text is None:
            print(*tokens, flush=True)
        else:
            print(text, flush=True)


def _text(tokens: list[int], model: Model) -> str | None:
    tokenizer: Any = model.tokenizer
    return None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
