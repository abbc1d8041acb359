"""Text from a language model: `python -m routing_lab.generate RUN "First Citizen:" [temperature=0.8] [top_p=0.95]`.

RUN is the folder of a finished run, or that of a decoder as transformers saves it, with its tokenizer, which further
words route: `python -m routing_lab.generate smollm "Once upon a time" method=dtrnet`. Besides: max_new_tokens=200
seed=0; temperature=0 takes the likeliest token. The text appears as it is made.

Exit codes: 0 all tokens are there; 1 the model cannot generate, and why; 2 the words were refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routing_lab.config import ConfigError
from routing_lab.config.problems import Problem, from_validation
from routing_lab.runs.records import RecordError


class Sampling(BaseModel):
    """How tokens are drawn; see `routing_lab.generating.pieces`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_new_tokens: int = Field(default=200, ge=1)
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=0.95, gt=0, le=1)
    seed: int = Field(default=0, ge=0, lt=2**63)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves through `sys.exit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0 if words else 2)
    try:
        place, prompt, sampling, overrides = checked(words)
        from routing_lab.generating import opened, pieces  # torch: only where something is generated

        model, encoding = opened(place, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except (RecordError, ValueError) as error:
        print(f"{words[0]}: {error}", file=sys.stderr)
        sys.exit(1)
    print(prompt, end="", flush=True)
    try:
        for piece in pieces(model, encoding, prompt, **sampling.model_dump()):
            print(piece, end="", flush=True)
    except ValueError as error:
        print(f"\n{place}: {error}", file=sys.stderr)
        sys.exit(1)
    print()
    sys.exit(0)


def checked(words: Sequence[str]) -> tuple[Path, str, Sampling, list[str]]:
    """Folder, prompt, how tokens are drawn, and overrides; raises ConfigError with every problem."""
    place, prompt, *rest = [*words, "", ""][: max(2, len(words))]
    given = [word.partition("=")[::2] for word in rest]
    own = {key: value for key, value in given if key in Sampling.model_fields}
    overrides = [word for word in rest if word.partition("=")[0] not in own]
    problems = []
    folder = Path(place).expanduser()
    is_run = (folder / "run.json").is_file()
    if not is_run and not (folder / "config.json").is_file():
        problems.append(Problem("RUN", place, "is neither a run folder (run.json) nor that of a model (config.json)"))
    if not prompt:
        problems.append(Problem("text", None, 'a text to go on with is expected, as in generate RUN "First Citizen:"'))
    problems += [Problem(word, None, "an override is expected, as in seed=1") for word in overrides if "=" not in word]
    if is_run:
        known = f"a run is routed already; known here: {', '.join(Sampling.model_fields)}"
        problems += [
            Problem(word.partition("=")[0], word.partition("=")[2], known) for word in overrides if "=" in word
        ]
    sampling = Sampling()
    try:
        sampling = Sampling.model_validate(own)
    except ValidationError as error:
        problems += from_validation(error, Sampling, "", own)
    if problems:
        raise ConfigError(problems)
    return folder, prompt, sampling, overrides


if __name__ == "__main__":
    main()
