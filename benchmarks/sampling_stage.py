"""Overhead of rollout generation over bare vLLM.

    python benchmarks/sampling_stage.py [--models models/SmolLM2-135M-Instruct runs/tiny/warmup/model] [--turns 3] [--passes 3]

"ours" is the generation of a recipe step: requests go one by one through throttle and client to the engine, and completions
return with a version and a log-prob per token. "bare" is `LLM.generate` with all requests at once. Both start vLLM with the
same arguments except weight transfer, with the same number of threads, prompts and seeds; the script checks that tokens and
log-probs are identical. Each turn is a separate process, and the variants alternate. Each pass has new prompts; the first
pass of a process warms up. CPU seconds, over all processes, are the more stable measure on a shared machine.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from transformers import AutoConfig

from torchtune_ext.sampling.backend import build_requests
from torchtune_ext.sampling.engine import Engine, EngineConfig, Priority, SamplingConfig
from torchtune_ext.sampling.engine_args import engine_args, engine_environment

PROMPTS, SAMPLES, PROMPT_TOKENS, MAX_TOKENS = 16, 8, 50, 16
WAYS = ("bare", "ours")
CONFIG = EngineConfig(max_model_len=256, dtype="float32", kv_cache_bytes=1 << 28, threads=1)

Way = Callable[[list[list[int]], SamplingConfig], list[tuple[list[int], list[float]]]]


def ours(model: str, stack: ExitStack) -> Way:
    engine = stack.enter_context(Engine(model, CONFIG, stack.enter_context(tempfile.TemporaryDirectory())))
    engine.start()
    engine.wait_ready()

    def draw(prompts, sampling):
        groups = engine.sample(prompts, SAMPLES, sampling)
        return [(one.tokens.tolist(), one.logprobs.tolist()) for group in groups for one in group]

    return draw


def bare(model: str, stack: ExitStack) -> Way:
    from vllm import LLM, SamplingParams

    args = engine_args(model, CONFIG)
    for ours_only in ("worker_extension_cls", "weight_transfer_config"):
        del args[ours_only]
    llm = LLM(**args)

    def draw(prompts, sampling):
        calls = [
            call
            for number, prompt in enumerate(prompts)
            for call in build_requests(prompt, SAMPLES, sampling, number, Priority.SAMPLE, CONFIG.max_model_len)
        ]
        inputs = [{"prompt_token_ids": call.prompt} for call in calls]
        answers = llm.generate(inputs, [SamplingParams(**call.vllm_params()) for call in calls], use_tqdm=False)
        drawn = [answer.outputs[0] for answer in answers]
        return [
            (
                list(one.token_ids),
                [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)],
            )
            for one in drawn
        ]

    return draw


def processor_s() -> float:
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def measure(way: str, model: str, passes: int) -> None:
    """Print a line per pass except the first: seconds, CPU seconds, tokens, and a digest of the samples."""
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    with ExitStack() as stack:
        draw = {"ours": ours, "bare": bare}[way](model, stack)
        for number in range(passes + 1):
            prompts = np.random.default_rng(number).integers(0, vocabulary, (PROMPTS, PROMPT_TOKENS)).tolist()
            began, used = time.perf_counter(), processor_s()
            drawn = draw(prompts, SamplingConfig(max_tokens=MAX_TOKENS, seed=number))
            seconds, used = time.perf_counter() - began, processor_s() - used
            digest = hashlib.sha256(np.float32([value for _, values in drawn for value in values]).tobytes())
            digest.update(json.dumps([tokens for tokens, _ in drawn]).encode())
            line = {"seconds": seconds, "processor": used, "tokens": sum(len(tokens) for tokens, _ in drawn)}
            if number:
                print("PASS", json.dumps(line | {"digest": digest.hexdigest()[:12]}), flush=True)


def turn(way: str, model: str, passes: int) -> list[dict]:
    command = [sys.executable, __file__, "--way", way, "--models", model, "--passes", str(passes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line.removeprefix("PASS")) for line in done.stdout.splitlines() if line.startswith("PASS")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["models/SmolLM2-135M-Instruct", "runs/tiny/warmup/model"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="measure this variant in this process (internal)")
    args = parser.parse_args()
    if missing := [model for model in args.models if not Path(model).is_dir()]:
        parser.error(
            f"--models {missing[0]}: not found. Fix: `make pretrained`; `tune run warmup_sft --config warmup/tiny`"
        )
    if args.way:
        return measure(args.way, args.models[0], args.passes)
    print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens x {SAMPLES} samples of {MAX_TOKENS}, float32, one thread\n")
    print(
        "| model | implementation | tokens/s, median (range) | relative to bare | "
        "tokens/CPU second | relative to bare | same samples |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        passes = {way: [] for way in WAYS}
        for _ in range(args.turns):
            for way in WAYS:
                passes[way] += turn(way, model, args.passes)
        digests = {way: [each["digest"] for each in passes[way]] for way in WAYS}
        base = {}
        for way in WAYS:
            rates = [each["tokens"] / each["seconds"] for each in passes[way]]
            used = median(each["tokens"] / each["processor"] for each in passes[way])
            base = base or {"rate": median(rates), "used": used}
            print(
                f"| {model} | {way} | {median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | "
                f"{median(rates) / base['rate']:.2f} | {used:,.0f} | {used / base['used']:.2f} | "
                f"{'yes' if digests[way] == digests['bare'] else 'NO'} |",
                flush=True,
            )


if __name__ == "__main__":
    # vLLM's environment variables must be set before its import.
    import os

    os.environ |= engine_environment(CONFIG)
    main()
