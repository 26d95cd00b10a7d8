"""Try the components of a run on small inputs before the run writes files or starts engines."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.objective.loss import LossRequirements, loss_requirements
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.policy.families import LONGROPE_TYPES
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import UsageError, wrap_user_errors
from torchtune_ext.sampling.engine_args import CPU_BLOCK_SIZE, engine_configs
from torchtune_ext.sampling.types import EngineConfig, SamplingConfig
from torchtune_ext.settings.yaml_types import kind_of
from torchtune_ext.setup.machine_checks import ADAMW_BYTES
from torchtune_ext.tasks.problem_stream import SHUFFLE_LIMIT
from torchtune_ext.tasks.task import AgentTask, EpisodeTask, Problem, SelfGradingTask, Task

if TYPE_CHECKING:
    from torchtune.modules import TransformerDecoder

    from torchtune_ext.grading.agents import AgentConfig

# Limits of the prompt measurement: problems and seconds.
MAX_PROBED_PROBLEMS, PROBE_LIMIT_S = 64, 1.0
# Two tokenizers that encode this text to the same ids are treated as equal.
TOKENIZER_PROBE = "The 7 quick foxes: 12+34=46, isn't it?\n"


def check_optimizer(make: Callable[..., Any], dims: Iterable[int] = (1, 2), device: str = "cpu") -> None:
    """Build the optimizer on small parameters and take a step on dense gradients.

    Args:
        make: builds the optimizer from `params`.
        dims: one parameter is made for each number of dimensions in `dims`.
        device: the type of the training device ("cpu", "cuda").

    Raises:
        UsageError: a setting is invalid, the component is not an optimizer, or its step fails.
    """
    # Some optimizers accept only matrices, so parameters with these dims are tried. They are on
    # the CPU, because an engine on the same GPU measures the free GPU memory later.
    params = [nn.Parameter(torch.zeros((2,) * ndim)) for ndim in sorted(dims)]
    optimizer = make(params=params)
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} is not a torch optimizer: it has no param_groups. Fix: name a class such "
            "as torch.optim.AdamW"
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    for rate in rates:
        # The schedule multiplies the rate, so an optimizer must not choose its own (None).
        if rate is None or not math.isfinite(rate):
            raise UsageError(f"optimizer.lr={rate} must be a finite number. Fix: set optimizer.lr=1e-5, for instance")
    if not any(rates):
        raise UsageError("optimizer.lr=0 never changes a weight. Fix: set optimizer.lr=1e-5, for instance")
    # An optimizer of another library may support only GPUs, as torch's own do with `capturable`.
    capturable = any(group.get("capturable") for group in optimizer.param_groups)
    if device != "cpu" and (capturable or not type(optimizer).__module__.startswith("torch.optim.")):
        return
    for param in params:
        param.grad = torch.ones_like(param)
    step = f"optimizer: a step of {type(optimizer).__name__}"
    with wrap_user_errors(f"{step} on dense gradients", "use torch.optim.AdamW, or change the settings"):
        optimizer.step()
    if sum(param.sum().item() for param in params) > 0:
        raise UsageError(f"{step} raises the loss. Fix: leave out optimizer.maximize")


def measure_optimizer_state(make: Callable[..., Any]) -> float:
    """Measure the bytes of optimizer state per trained value, by a step on one matrix.

    Args:
        make: builds the optimizer from `params`.

    Returns:
        The bytes. For an optimizer that takes no step on a CPU, the bytes of AdamW.
    """
    # Optimizers with quantized state quantize only tensors of some thousand values.
    param = nn.Parameter(torch.zeros(256, 1024))
    param.grad = torch.zeros_like(param)
    try:
        optimizer = make(params=[param])
        # torchao compiles its step, which would take seconds.
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    except Exception:  # noqa: BLE001  (`check_optimizer` reports errors of optimizers for the CPU)
        return ADAMW_BYTES
    # A single value counts steps.
    return sum(_stored_bytes(tensor) for tensor in tensors if tensor.numel() > 1) / param.numel()


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, which may be quantized."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def check_loss(loss: Any) -> None:
    """Call the loss on three labels of two completions, and on an empty row.

    Raises:
        UsageError: the loss is not callable, does not return one value per label, or has no
            gradient.
        UserCodeError: the loss raised an error.
    """
    name, needs = _name(loss), loss_requirements(loss)
    if not callable(loss):
        raise UsageError(
            f"loss: {name} is not callable. Fix: define `def __call__(self, t)` (docs/how_to/algorithms.md)"
        )
    # The first update of a step has no other policy for comparing the top-k log-probs.
    top_ks = [needs.top_k, 0] if needs.top_k else [0]
    # A rank with an empty row calls the loss without labels.
    for labels, top_k in [(3, top_k) for top_k in top_ks] + [(0, top_k) for top_k in top_ks]:
        count = "three labels" if labels else "no labels (an empty row)"
        with wrap_user_errors(f"loss: {name}, called with {count},"), torch.enable_grad():
            returned = loss(_example(needs, labels, top_k))
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise UsageError(
                f"loss: {name} returned {kind_of(returned)}. Fix: return (one value per label, a dict of metrics, which "
                "may be empty)"
            )
        if "total" in returned[1]:
            raise UsageError(
                f"loss: {name}: the metric 'total' is the loss itself (loss/total). Fix: give it another name"
            )
        metrics = {f"metric {key!r}": value for key, value in returned[1].items()}
        for value_name, value in {"its loss": returned[0], **metrics}.items():
            actual = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind_of(value)
            if not isinstance(value, torch.Tensor) or value.shape != (labels,):
                raise UsageError(
                    f"loss: {name}: {value_name} has {actual} for {count}. Fix: return one value per label, shape ({labels},)"
                )
        if not returned[0].requires_grad:
            raise UsageError(f"loss: {name}: its loss of {count} has no gradient. Fix: compute it from t.logprobs_L")


def _example(needs: LossRequirements, labels: int, top_k: int) -> Tokens:
    """Return the input of a loss for a row with up to three labels."""
    logprobs_L = torch.tensor([-1.0, -0.5, -2.0])[:labels]
    # The K tokens share half of the probability, so the log of the remaining probability is finite.
    top_LK = torch.full((labels, top_k), -math.log(2 * top_k)) if top_k else None
    return Tokens(
        logprobs_L=logprobs_L.clone().requires_grad_(),
        entropy_L=torch.ones(labels).requires_grad_(),
        proximal_logprobs_L=logprobs_L.clone() if needs.proximal_logprobs else None,
        behavior_logprobs_L=logprobs_L.clone(),
        ref_logprobs_L=logprobs_L.clone() if needs.reference_logprobs else None,
        teacher_logprobs_L=logprobs_L.clone() if needs.teacher_logprobs else None,
        advantages_L=torch.tensor([1.0, 1.0, -1.0])[:labels],
        versions_L=torch.zeros(labels, dtype=torch.int32),
        completion_index_L=torch.tensor([0, 0, 1])[:labels],
        proximal_top_LK=top_LK,
        top_LK=top_LK,
        version=0,
    )


def check_task(
    task: Task, key: str, require_finite: bool = False, needs_solutions: bool = False, grades: bool = True
) -> None:
    """Check the methods of a task and its first problems, until one problem is valid.

    Args:
        task: the task.
        key: the config key of the task, for messages.
        require_finite: all problems will be used, so the task must be finite.
        needs_solutions: the task must have solutions.
        grades: the task must have a grader.

    Raises:
        UsageError: a method is missing, the length does not fit, or none of the first
            `MAX_PROBED_PROBLEMS` problems is valid.
    """
    name = _name(task)
    for method, what, needed in (
        ("__len__", "the number of its problems, or torchtune_ext.tasks.task.ENDLESS_LENGTH if they never end", True),
        ("__getitem__", "the problem at an index", True),
        ("solution", "a text with reward 1.0 for a problem", needs_solutions),
    ):
        if needed and not hasattr(task, method):
            raise UsageError(
                f"{key}: {name} has no `{method}`. Fix: define it to return {what} (docs/how_to/dataset.md)"
            )
    graders = [getattr(task, method, None) for method in ("grade", "grade_group", "environment", "run_agent")]
    if grades and not isinstance(task, SelfGradingTask) and not any(map(callable, graders)):
        raise UsageError(
            f"{key}: {name} has no `grade`. Fix: define `def grade(self, problem, text)`, which returns a number or a Score "
            "(docs/how_to/dataset.md). For several graders, call them in one function"
        )
    if hasattr(task, "environment"):
        turns = getattr(task, "max_turns", None)
        if not isinstance(turns, int) or turns < 1:
            raise UsageError(
                f"{key}: {name} has an environment and max_turns={turns!r}; expected an integer of at least 1, the number of "
                "turns after which an episode ends (docs/how_to/environments.md)"
            )
    with wrap_user_errors(f"{key}: len({name}(...))"):
        length = len(task)
    if length < 1:
        raise UsageError(f"{key}: {name} has {length} problems; expected at least 1")
    if require_finite and length > SHUFFLE_LIMIT:
        raise UsageError(
            f"{key}: {name} never ends ({length:,} problems), but `{key}` uses all of them. "
            f"Fix: set {key}.count=256, for instance"
        )
    first: ValueError | None = None
    for index in range(min(length, MAX_PROBED_PROBLEMS)):
        try:
            with wrap_user_errors(f"{key}: {name}(...)[{index}]"):
                problem = task[index]
            _require_problem(problem, f"{key}: {name}(...)[{index}]")
            return
        except ValueError as error:
            # A run skips an invalid row, but at least one row must be valid.
            first = first or error
    assert first is not None
    raise first


def _require_problem(problem: Any, what: str) -> None:
    if not isinstance(problem, Problem):
        raise UsageError(
            f"{what} is {kind_of(problem)}; expected a Problem. Fix: return torchtune_ext.tasks.task.Problem(id, "
            "messages, answer)"
        )
    messages = problem.messages
    if (
        not isinstance(messages, tuple | list)
        or not messages
        or not all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in messages)
    ):
        raise UsageError(
            f'{what} has messages={messages!r:.80}; expected a tuple of dicts: ({{"role": "user", "content": "the question"}},)'
        )
    # The stored rollouts of a step contain the answer as JSON.
    with wrap_user_errors(f"{what}: its answer as JSON", "use text as the keys of its dicts"):
        json.dumps(problem.answer, default=repr)


def measure_prompts(task: Task, tokenizer: ChatTokenizer, key: str) -> list[int]:
    """Measure the prompts of problems spread over a task, in tokens.

    Problems that cannot be loaded or encoded are skipped.

    Args:
        task: the task.
        tokenizer: encodes the prompts.
        key: the config key of the task, for messages.

    Returns:
        The number of tokens of each measured prompt, at most `MAX_PROBED_PROBLEMS`.

    Raises:
        UsageError: no prompt can be encoded, the chat template omits the tools or a message of a
            problem, or two problems with different messages have the same prompt.
    """
    lengths, began, first = [], time.monotonic(), None
    checked_roles: set[tuple[str, ...]] = set()  # the role sequences that `_require_shown` has checked
    known: dict[tuple[int, ...], tuple[int, str]] = {}  # prompt ids -> index and text of the problem
    # The indices are evenly spaced, so a task sorted by length also shows its long prompts. For an
    # endless task, the first problems are measured.
    num_probed = min(len(task), MAX_PROBED_PROBLEMS)
    num_indexed = len(task) if len(task) <= SHUFFLE_LIMIT else MAX_PROBED_PROBLEMS
    for index in (i * num_indexed // num_probed for i in range(num_probed)):
        if lengths and time.monotonic() - began > PROBE_LIMIT_S:
            break
        try:
            with wrap_user_errors(f"{key}: the prompt of {_name(task)}(...)[{index}]"):
                problem = task[index]
                ids = tokenizer.prompt_ids(problem.messages, problem.tools)
        except ValueError as error:
            first = first or error
        else:
            lengths.append(len(ids))
            if (roles := tuple(message["role"] for message in problem.messages)) not in checked_roles:
                _require_shown(problem, ids, tokenizer, f"{key}: {_name(task)}(...)[{index}]")
                checked_roles.add(roles)
            # Templates may strip whitespace.
            texts = "".join(str(message.get("content")) for message in problem.messages)
            other, others = known.setdefault(tuple(ids), (index, words := "".join(texts.split()).casefold()))
            if words != others:
                raise UsageError(
                    f"{key}: problems {other} and {index} of {_name(task)} have different messages but the same prompt of "
                    f"{len(ids)} tokens: the tokenizer or its chat template drops the difference. Fix: change "
                    "tokenizer.path or tokenizer.template"
                )
            # A template without tool support gives the same prompt.
            if problem.tools and ids == tokenizer.prompt_ids(problem.messages):
                raise UsageError(
                    f"{key}: {_name(task)}(...)[{index}] has tools, which the chat template {tokenizer.template.name!r} omits. "
                    "Fix: set tokenizer.template to a template with tools, or describe them in a message "
                    "(docs/how_to/environments.md)"
                )
    if not lengths:
        assert first is not None
        raise first
    return lengths


def _require_shown(problem: Problem, ids: Sequence[int], tokenizer: ChatTokenizer, what: str) -> None:
    """Raise UsageError if the chat template omits a message of a problem with this prompt."""
    # A template may trim, escape or move a text, or interpret "/no_think" in it. So the check does
    # not search for the text: a longer text must change the prompt. The added text repeats words of
    # the message, because a tokenizer may drop other words. It leaves out the text before
    # `</think>`, which templates omit from older turns.
    messages = list(problem.messages)
    for i, message in enumerate(messages):
        if message.get("tool_calls") or not (content := str(message.get("content") or "")).strip():
            continue
        messages[i] = {**message, "content": f"{content} 7 {content.rpartition('</think>')[2]}"}
        if tokenizer.prompt_ids(messages, problem.tools) == ids:
            raise UsageError(
                f"{what}: the chat template {tokenizer.template.name!r} omits its message of role "
                f"{message['role']!r}, {content!r:.60}. Fix: set tokenizer.template to a template that shows it, or put "
                "the text into a message of another role"
            )
        messages[i] = message


def check_prompts(
    tasks: Mapping[str, Task | None],
    tokenizer: ChatTokenizer,
    sampling: SamplingConfig,
    engine: EngineConfig,
    hf_model: HFModel,
) -> None:
    """Compare some prompts of each task with the prompt length that the engine allows.

    Args:
        tasks: the tasks by config key.
        tokenizer: encodes the prompts.
        sampling: its `max_tokens` are reserved for the completion.
        engine: its `max_model_len` bounds prompt and completion.
        hf_model: the model, whose positions bound the suggested `max_model_len`.

    Raises:
        UsageError: no tokens are left for a prompt, or every measured prompt is longer.
    """
    prompt_room = engine.max_model_len - sampling.max_tokens
    if prompt_room < 1:
        raise UsageError(
            f"sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt in engine.max_model_len="
            f"{engine.max_model_len} (prompt and completion). Fix: lower max_tokens, or raise max_model_len"
        )
    for key, task in tasks.items():
        if task is None:
            continue
        if isinstance(task, EpisodeTask | AgentTask):
            # Some chat templates cannot be continued after an answer.
            with wrap_user_errors(f"{key}: {_name(task)} has several turns:"):
                turn, answer = {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}
                if tokenizer.history == "template":
                    tokenizer.context_ids([answer], [turn, answer], [[*tokenizer.encode("x"), tokenizer.eos_id]])
                else:
                    tokenizer.turn_boundary_ids([answer], tokenizer.eos_id)
        lengths = measure_prompts(task, tokenizer, key)
        shortest, longest = min(lengths), max(lengths)
        # A run skips prompts that are too long. Here it would skip all.
        if shortest > prompt_room:
            range_text = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
            needed, positions = sampling.max_tokens + longest, max_positions(hf_model)
            limit, fix = "", f"set engine.max_model_len={needed}, or"
            if needed > positions:
                limit, fix = f"; the model has {positions} positions", "set"
            raise UsageError(
                f"sampling.max_tokens={sampling.max_tokens} allows a prompt length of {prompt_room} in "
                f"engine.max_model_len={engine.max_model_len}, but the {len(lengths)} measured prompts of {key} have "
                f"{range_text} tokens{limit}. Fix: {fix} a lower max_tokens"
            )


def find_eval_overlap(task: Task, held_out: Task | None) -> list[str]:
    """Return the ids of held-out problems that are also in the training task.

    The search ends after `PROBE_LIMIT_S` seconds per task.

    Raises:
        UsageError: the two tasks have the same problems.
    """
    # The problems of endless tasks cannot be listed.
    if held_out is None or max(len(task), len(held_out)) > SHUFFLE_LIMIT:
        return []
    train_ids, others = _ids(task), _ids(held_out)
    overlap = [name for messages, name in others.items() if messages in train_ids]
    if len(overlap) == len(task) == len(held_out):
        raise UsageError(
            f"evaluation.task has the {len(overlap):,} problems of `task`, so it would measure memorization. Fix: hold "
            "some out (first, count or split), or set evaluation.task=null"
        )
    return overlap


def _ids(task: Task) -> dict[str, str]:
    """Return the problem ids of a task by content, as many as load in `PROBE_LIMIT_S` seconds."""
    ids, began = {}, time.monotonic()
    for index in range(len(task)):
        if time.monotonic() - began > PROBE_LIMIT_S:
            break
        try:
            problem = task[index]
            # Many conversations begin with the same text, so the hidden answer is part of the key.
            hidden = problem.answer if isinstance(task, EpisodeTask) else None
            ids[str((list(problem.messages), hidden))] = problem.id
        except Exception:  # noqa: BLE001 (the code of the task)
            continue  # the run reports an invalid row when it reaches it
    return ids


def check_tokenizer(
    tokenizer: ChatTokenizer, hf_model: HFModel, vocab_rows: int | None = None, stop_ids: Sequence[int] = ()
) -> None:
    """Compare a tokenizer with the model.

    Args:
        tokenizer: the tokenizer of the run.
        hf_model: the model directory.
        vocab_rows: rows of the model's embedding; None: `vocab_size` of config.json.
        stop_ids: ids that end a completion (`sampling.stop_token_ids`).

    Raises:
        UsageError: the model lacks an id, or the model's own tokenizer encodes text differently.
    """
    vocab_rows = int(hf_model.config["vocab_size"]) if vocab_rows is None else vocab_rows
    fix = f"they do not belong together: set tokenizer.path={hf_model.path}"
    where = getattr(tokenizer, "path", None)
    highest = getattr(tokenizer, "vocab_size", 0)
    if highest > vocab_rows:
        # If a token was added without a row in the embedding, another tokenizer would not help.
        added = tokenizer.tokens_from_id(vocab_rows)
        named = f" (such as {', '.join(map(repr, added[:3]))})" if added else ""
        if where is not None and Path(where).resolve() == hf_model.path.resolve():
            fix = "they were added to the tokenizer but not to the model: take both from the same source"
        raise UsageError(
            f"tokenizer.path={where} has ids up to {highest - 1}{named}, but the model in model_dir={hf_model.path} "
            f"has {vocab_rows}; {fix}"
        )
    if unknown_ids := [token for token in stop_ids if not 0 <= token < vocab_rows]:
        subject = f"sampling.stop_token_ids names {unknown_ids[0]}"
        if unknown_ids[0] in getattr(tokenizer, "stop_token_ids", ()):
            subject = f"generation_config.json or config.json in {where} has eos_token_id={unknown_ids[0]}"
        raise UsageError(
            f"{subject}, but the model in model_dir={hf_model.path} has ids from 0 to {vocab_rows - 1}: no completion "
            "would end with it. Fix: use an id from tokenizer.json, or leave it out"
        )
    files = [Path(folder or ".") / "tokenizer.json" for folder in (where, hf_model.path)]
    if where is None or not all(file.is_file() for file in files) or files[0].resolve() == files[1].resolve():
        return
    if len({tuple(_encode_probe(file)) for file in files}) > 1:
        raise UsageError(
            f"tokenizer.path={where} encodes text differently from the tokenizer in model_dir={hf_model.path}; {fix}"
        )


def _encode_probe(file: Path) -> list[int]:
    with wrap_user_errors(f"reading {file}", "copy the file again from the model repository"):
        return Tokenizer.from_file(str(file)).encode(TOKENIZER_PROBE, add_special_tokens=False).ids


def require_row_capacity(row_tokens: int, engine: EngineConfig) -> None:
    """Raise UsageError if a row is too short for the engine's longest sequence."""
    if row_tokens < engine.max_model_len:
        raise UsageError(
            f"row_tokens={row_tokens} must be at least {engine.max_model_len}: one row holds a prompt with a completion, "
            f"up to engine.max_model_len={engine.max_model_len} tokens. Fix: raise row_tokens, or lower max_model_len"
        )


def check_engine(hf_model: HFModel, engine: EngineConfig, model: "TransformerDecoder | None" = None) -> None:
    """Compare the engine's settings with the sizes of the model.

    Args:
        hf_model: the model directory.
        engine: the engine's settings.
        model: the model on the meta device if it is trained.

    Raises:
        UsageError: the model cannot be sharded over the engine's GPUs, or the model's positions or
            the KV cache are too short for `engine.max_model_len`.
    """
    size, heads = engine.tensor_parallel_size, int(hf_model.config["num_attention_heads"])
    divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and n <= 16)
    if heads % size:
        raise UsageError(
            f"engine.tensor_parallel_size={size} does not divide the model's {heads} attention heads. Fix: use "
            f"one of {divisors}"
        )
    if size > 1 and hf_model.config.get("model_type") == "olmo2":
        raise UsageError(
            f"engine.tensor_parallel_size={size} with olmo2: vLLM has no olmo2 model that norms queries and keys over "
            "all heads when they are sharded. Fix: set it to 1, and engine.devices for more GPUs"
        )
    engine_configs(engine)  # raises for inconsistent settings
    if engine.max_model_len > (longest := max_positions(hf_model)):
        key = "original_" * (hf_model.config.get("rope_type") in LONGROPE_TYPES) + "max_position_embeddings"
        raise UsageError(
            f"engine.max_model_len={engine.max_model_len} is more than the {longest} positions of the model "
            f"({key} in {hf_model.path / 'config.json'}). Fix: set engine.max_model_len={longest} or less"
        )
    if model is not None and engine.max_model_len > model.max_seq_len:
        raise UsageError(
            f"engine.max_model_len={engine.max_model_len} is more than the {model.max_seq_len} positions of the trained "
            f"model. Fix: set model.max_seq_len={engine.max_model_len}, or a lower max_model_len"
        )
    starts_engine = engine.address is None and "kv_cache_dtype" not in engine.extra_args
    layers: list[Any] = [] if model is None else [*model.layers]
    # Of layers with a window, vLLM keeps fewer tokens, by rules of its own.
    has_windows = any(getattr(layer.attn, "window", None) for layer in layers)
    if layers and starts_engine and engine.kv_cache_bytes is not None and not has_windows:
        attn, itemsize = layers[0].attn, 4 if engine.dtype == "float32" else 2
        # Bytes of the keys and values of one token. With fewer heads than GPUs, heads are
        # replicated, so the quotient rounds up.
        token = 2 * len(layers) * -(-attn.num_kv_heads // size) * attn.head_dim * itemsize
        block = engine.block_size or CPU_BLOCK_SIZE
        needed = token * block * (-(-engine.max_model_len // block) + 1)
        if engine.kv_cache_bytes < needed:
            raise UsageError(
                f"engine.kv_cache_bytes={engine.kv_cache_bytes} holds {engine.kv_cache_bytes // token} tokens of this model, "
                f"too few for one sequence of engine.max_model_len={engine.max_model_len}. Fix: set it to {needed} or more"
            )


def max_positions(hf_model: HFModel) -> float:
    """Return the positions of a model; infinity if only the engine knows them."""
    # Scaled RoPE extends beyond max_position_embeddings.
    config = hf_model.config
    if config.get("rope_type") in LONGROPE_TYPES:
        return config["original_max_position_embeddings"]
    kind = (config.get("rope_parameters") or {}).get("rope_type", "default")
    # In Gemma 3, max_position_embeddings includes the scaling.
    scaled = (config.get("rope_scaling") or kind != "default") and config.get("model_type") != "gemma3_text"
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) and not scaled else math.inf


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def check_agents(
    tasks: Sequence[Task | None],
    tokenizer: ChatTokenizer,
    sampling: SamplingConfig,
    max_model_len: int,
    config: "AgentConfig",
) -> None:
    """Run the agents of the training and the held-out task on a problem, without the policy.

    Raises:
        UsageError: an agent ends without a response, or `agent.host` is not an address of this machine.
    """
    checked = []
    for task, key in zip(tasks, ("task", "evaluation.task"), strict=False):
        agent = (type(task), getattr(task, "__dict__", {}).get("run_agent"))
        if isinstance(task, AgentTask) and agent not in checked:
            # Imported here, since only runs with agents need the server.
            from torchtune_ext.setup.agent_check import check_agent

            checked.append(agent)
            check_agent(task, key, tokenizer, sampling, max_model_len, config)
