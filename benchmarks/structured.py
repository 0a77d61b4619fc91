"""Structured output: whether answers are valid, what a mask costs, and how fast constrained streams are.

    python benchmarks/structured.py suite MODEL     every answer to a schema of the JSON Schema Test Suite is valid
    python benchmarks/structured.py mask MODEL      time of one mask, over this model's vocabulary (Qwen's has 151,936)
    python benchmarks/structured.py streams MODEL   8 constrained streams beside 8 free ones, in turns

A table for people, then one line of JSON.
"""

import argparse
import json
import lzma
import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

import everwarm
from everwarm.engine.processors import only_token
from everwarm.errors import RequestError
from everwarm.kernels.native import NativeRows
from everwarm.llm import LLM
from everwarm.structured import grammar
from everwarm.structured.grammars import Grammars
from everwarm.text.tokenizer import Tokenizer
from everwarm.weights.gguf.file import GGUFFile

SUITE = Path(__file__).parent.parent / "tests" / "golden" / "json_schemas.json.xz"
STREAMS = 8

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "email": {"type": "string", "format": "email"},
                "country": {"enum": ["AT", "CH", "DE", "FR", "IT"]},
            },
            "required": ["name", "email", "country"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "minItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "product": {"type": "string"},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
                    "note": {"anyOf": [{"type": "string", "maxLength": 80}, {"type": "null"}]},
                },
                "required": ["product", "quantity", "note"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "customer", "lines"],
    "additionalProperties": False,
}
"""Of the kind that agents ask for: many tokens are forced."""

SCHEMAS: dict[str, Any] = {
    "free": None,
    "order": ORDER,
    "text": {"type": "string", "minLength": 10_000, "maxLength": 20_000},  # hardly any token is forced
}


def is_valid(schema: Any, text: str) -> bool:
    """The validator computes with floats, for which 8030.4445 is no multiple of 0.0001: so decimals count, too."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return Draft202012Validator(schema).is_valid(json.loads(text)) or Draft202012Validator(exact).is_valid(
        json.loads(text, parse_float=Decimal)
    )


def suite(model: str, seeds: int, most: int) -> dict[str, Any]:
    """Every schema of the suite that is supported, with several seeds."""
    cases = json.loads(lzma.decompress(SUITE.read_bytes()))
    found: Counter[str] = Counter(schemas=len(cases))
    wrong: list[str] = []
    with everwarm.load(model) as llm, ThreadPoolExecutor(STREAMS) as threads:

        def supported(case: dict[str, Any]) -> bool:
            try:
                llm.grammars.constraint(grammar.json_schema(case["schema"]))
            except RequestError:
                return False
            return True

        def answer(job: tuple[dict[str, Any], int]) -> tuple[str, str]:
            case, seed = job
            prompt = f"Write a JSON value that is valid under this schema: {json.dumps(case['schema'])[:2000]}"
            messages = [{"role": "user", "content": prompt}]
            completion = llm.generate(
                messages=messages, schema=case["schema"], temperature=1.0, seed=seed, max_tokens=most, cache=False
            )
            if completion.finish_reason == "length":
                return "cut by max_tokens", ""
            valid = is_valid(case["schema"], completion.text)
            return ("valid", "") if valid else ("INVALID", f"{case['title']}: {completion.text}")

        kept = [case for case in cases if supported(case)]
        found["supported"] = len(kept)
        for kind, text in threads.map(answer, [(case, seed) for case in kept for seed in range(seeds)]):
            found[kind] += 1
            wrong += [text] if text else []
    for text in wrong:
        print("INVALID", text)
    return dict(found)


def mask(model: str) -> dict[str, Any]:
    """Masks while answers are made of random tokens that are allowed, which is harder than what a model says."""
    with GGUFFile(Path(model)) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    started = time.perf_counter()
    grammars, rows = Grammars(tokenizer), NativeRows()
    grammars.constraint(grammar.json_object())
    built = time.perf_counter() - started
    schemas = {"order": ORDER, "any object": {"type": "object"}} | {
        case["title"]: case["schema"] for case in json.loads(lzma.decompress(SUITE.read_bytes()))
    }
    draw = random.Random(1)
    masks, applied, compiled = [], [], []
    logits = np.random.default_rng(0).standard_normal(tokenizer.vocab_size).astype(np.float32)
    for schema in schemas.values():
        started = time.perf_counter()
        try:
            make = grammars.constraint(grammar.json_schema(schema))
        except RequestError:
            continue
        compiled.append(time.perf_counter() - started)
        for _ in range(3):
            constraint = make()
            for _ in range(60):
                started = time.perf_counter()
                allowed = constraint.mask()
                if allowed is None:
                    break
                only_token(allowed)
                masks.append(time.perf_counter() - started)
                row = logits.copy()
                started = time.perf_counter()
                rows.forbid(row, allowed)
                applied.append(time.perf_counter() - started)
                ids = np.flatnonzero(np.isfinite(row))
                constraint.advance(int(ids[draw.randrange(len(ids))]))
    grammars.close()

    def ms(seconds: list[float], share: float) -> float:
        return round(1e3 * float(np.quantile(seconds, share)), 4)

    return {
        "vocabulary": tokenizer.vocab_size,
        "masks": len(masks),
        "tokenizer_s": round(built, 3),
        "compile_p50_ms": ms(compiled, 0.5),
        "compile_p99_ms": ms(compiled, 0.99),
        "mask_p50_ms": ms(masks, 0.5),
        "mask_p99_ms": ms(masks, 0.99),
        "mask_max_ms": ms(masks, 1.0),
        "apply_p50_ms": ms(applied, 0.5),
        "apply_p99_ms": ms(applied, 0.99),
    }


def streams(model: str, rounds: int, most: int) -> dict[str, Any]:
    """Tokens per second of 8 streams at once; free and constrained ones in turns."""
    with everwarm.load(model) as llm:
        llm.warm_up()
        speeds: dict[str, list[float]] = {name: [] for name in SCHEMAS}
        for number in range(rounds):
            for name, schema in SCHEMAS.items():
                speeds[name].append(_speed(llm, number, most, schema))
    found: dict[str, Any] = {}
    for name, values in speeds.items():
        found[f"{name}_tok_s"] = round(statistics.median(values), 1)
        if name != "free":
            ratios = [value / free for value, free in zip(values, speeds["free"], strict=True)]
            found[f"{name}_ratio"] = round(statistics.median(ratios), 3)
            found[f"{name}_ratios"] = [round(ratio, 2) for ratio in ratios]
    return found


def _speed(llm: LLM, number: int, most: int, schema: Any) -> float:
    """All tokens that were decoded while all streams ran, by the time that this took."""
    order = "Write an order of a customer with ten lines as JSON, in detail."
    messages = [{"role": "user", "content": order}]
    options = {"max_tokens": most, "temperature": 1.0, "schema": schema, "cache": False}

    def one(stream: int) -> tuple[float, float, int]:
        events = llm.stream(messages=messages, seed=100 * number + stream, ignore_eos=schema is None, **options)
        times = [time.perf_counter() for event in events if isinstance(event, everwarm.Event)]
        return times[0], times[-1], len(times) - 1

    with ThreadPoolExecutor(STREAMS) as threads:
        runs = list(threads.map(one, range(STREAMS)))
    return sum(count / (last - first) for first, last, count in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["suite", "mask", "streams"])
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    given = parser.parse_args()
    match given.what:
        case "suite":
            result = suite(given.model, given.seeds, given.max_tokens)
        case "mask":
            result = mask(given.model)
        case _:
            result = streams(given.model, given.rounds, given.max_tokens)
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps({"benchmark": f"structured {given.what}", **result}))


if __name__ == "__main__":
    main()
