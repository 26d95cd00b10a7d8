"""Usage errors in user classes, data files and model directories: name -> case."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from trying import MATMUL, RUN, Mistake, evaluate, full, warmup

JSONL = "torchtune_ext.tasks.jsonl.Jsonl"
CLUE = "torchtune_ext.tasks.temporal_clue.TemporalClue"
ARITHMETIC = "torchtune_ext.tasks.arithmetic.Arithmetic"
ROWS = '{"question": "1+1=", "answer": "2"}\n'


def task(body: str, says: str, words: str = "", **more) -> Mistake:
    """A task whose class overrides `sums.Base` with `body`."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    text = f"import os\nimport time\n\nfrom sums import Base, Problem, Score\n\n\nclass Mine(Base):\n{lines}\n"
    return full(f"task._component_=mine.Mine {words}", says, files={"mine.py": text}, **more)


def alone(body: str, says: str) -> Mistake:
    """A task without a base class."""
    text = "from sums import Problem, Score\n\n\nclass Mine:\n" + "\n".join(f"    {line}" for line in body.splitlines())
    return full("task._component_=mine.Mine", says, files={"mine.py": text + "\n"})


def loss(body: str, says: str, words: str = "") -> Mistake:
    text = "class Mine:\n" + "\n".join(f"    {line}" for line in body.splitlines()) + "\n"
    return full(f"loss._component_=mine.Mine {words}", says, files={"mine.py": text})


def environment(body: str, says: str, words: str = "", turns: str = "max_turns = 3") -> Mistake:
    """A task whose environment runs `body` in `step`."""
    inside = body.replace("\n", "\n            ")
    game = f"class Game:\n        def step(self, message):\n            {inside}\n    return Game()"
    return task(f"{turns}\ndef environment(self, problem, seed):\n    {game}", says, words)


LENGTH = "def __len__(self): return 4"
GET = "def __getitem__(self, i): return Problem(str(i), ({'role': 'user', 'content': 'x'},), i)"
GRADE = "def grade(self, problem, text): return Score(0.0, {})"


def rows(path: str, says: str):
    """An error in the source of rows or in the names of their fields."""
    chat = '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "answer": "2"}\n'
    files = {"mine.py": "def same(problem, text): return 1.0\n", "rows.jsonl": ROWS, "chat.jsonl": chat}
    files |= {"rows.txt": "question,answer\n1+1=,2\n", "rows.csv": 'question,answer\n"1+1="x,2\n'}
    return full(f"task._component_={JSONL} task.path={path} task.grader=mine.same", says, files=files)


# fmt: off
CLASSES = {
    "a class that is not there": full("task._component_=sums.Bas", r"`task:` _component_=sums.Bas: sums has no 'Bas'; did you mean 'Base'\?"),
    "a module that is not there": full("task._component_=sum.Base", r"`task:` _component_=sum.Base: module 'sum' not found, neither installed nor as sum.py in .*; did you mean 'sums'\?"),
    "a bare name": full("task._component_=Sums", r"`task:` 'Sums' is not defined in the recipe\. Fix: give a dotted path, or define it there"),
    "a path of a file": full("task._component_=sums.py:Base", r"`task:` _component_=sums.py:Base is not a dotted path. Fix: write my_task.Sums for the class Sums in my_task.py"),
    "a folder of ours": full("task._component_=torchtune_ext.tasks.temporal_clu.TemporalClue", r"torchtune_ext.tasks has no 'temporal_clu'; did you mean 'temporal_clue'\?"),
    "a class that moved": full("task._component_=torchtune_ext.source.GroupSource", r"`task:` _component_=torchtune_ext.source.GroupSource: torchtune_ext.source.GroupSource moved to torchtune_ext.pipeline.source.GroupSource"),
    "a module of ones own with an import that moved": full("task._component_=mine.Mine", r"importing mine raised ModuleNotFoundError: torchtune_ext.groups moved to torchtune_ext.pipeline.groups \(mine.py:1\)", files={"mine.py": "from torchtune_ext.groups import Group\n"}),
    "an optimizer that is not there": full("optimizer._component_=torch.optim.Adam2", r"`optimizer:` _component_=torch.optim.Adam2: torch.optim has no 'Adam2'; did you mean 'Adam'\?"),
    "a module for a class": full("optimizer._component_=torch.optim", r"`optimizer:` _component_=torch.optim is a module. Fix: name a class or a function"),
    "no component": Mistake("run grpo_full --config plain.yaml", r"`task:` needs a `_component_`, the dotted path of a class or function", files={"plain.yaml": RUN.replace("task: {_component_: sums.Base}\n", "task: {count: 3}\n", 1)}),
    "a mapping for a component": full("'task={count: 3}'", r"`task:` a component on the command line cannot be a mapping\. Fix: write task.count=3"),
    "a syntax error": full("task._component_=mine.Mine", r"`task:` _component_=mine.Mine: importing mine raised SyntaxError: .*\(mine.py:1\)", files={"mine.py": "class Mine(:\n"}),
    "an import that fails": full("task._component_=mine.Mine", r"importing mine raised ModuleNotFoundError: No module named 'nosuchpackage' \(mine.py:1\)", files={"mine.py": "import nosuchpackage\n"}),
    "__init__ raises": task("def __init__(self): {}['rows']", r"`task:` mine.Mine raised KeyError: 'rows' \(mine.py:8\)\n\(TORCHTUNE_EXT_TRACEBACK=1 shows the traceback\)"),
    "__init__ refuses": task("def __init__(self): raise ValueError('no rows here')", r"`task:` mine.Mine raised no rows here \(mine.py:8\)"),
    "__init__ opens a missing file": task("def __init__(self): open('rows.txt')", r"`task:` mine.Mine raised FileNotFoundError: .*'rows.txt' \(mine.py:8\)"),
    "no __len__": alone(f"{GET}\n{GRADE}", r"task: Mine has no `__len__`\. Fix: define it to return the number of its problems, or .*ENDLESS"),
    "no __getitem__": alone(f"{LENGTH}\n{GRADE}", r"task: Mine has no `__getitem__`\. Fix: define it to return the problem at an index"),
    "no grade": alone(f"{LENGTH}\n{GET}", r"task: Mine has no `grade`\. Fix: define `def grade\(self, problem, text\)`"),
    "no problems": task("def __len__(self): return 0", r"task: Mine has 0 problems; expected at least 1"),
    "__len__ raises": task("def __len__(self): return self.rows", r"task: len\(Mine\(\.\.\.\)\) raised AttributeError: .*\(mine.py:8\)"),
    "__getitem__ raises": task("def __getitem__(self, i): return {}[i]", r"task: Mine\(\.\.\.\)\[0\] raised KeyError: 0 \(mine.py:8\)"),
    "__getitem__ returns a dict": task("def __getitem__(self, i): return {'prompt': 'x'}", r"task: Mine\(\.\.\.\)\[0\] is a dict; expected a Problem\. Fix: return .*Problem\(id, messages, answer\)", real=True),
    "messages are a text": task("def __getitem__(self, i): return Problem('x', 'what?', 1)", r"task: Mine\(\.\.\.\)\[0\] has messages='what\?'; expected a tuple of dicts: \(\{\"role\": \"user\""),
    "an answer with tuples as keys": task("def __getitem__(self, i): return Problem('x', ({'role': 'user', 'content': 'x'},), {(0, 1): 2})", r"task: Mine\(\.\.\.\)\[0\]: its answer as JSON raised TypeError: keys must be str.*. Fix: use text as the keys of its dicts"),
    "messages without a role": task("def __getitem__(self, i): return Problem('x', ({'content': 'x'},), 1)", r"task: Mine\(\.\.\.\)\[0\] has messages=.*expected a tuple of dicts: \(\{\"role\": \"user\""),
    "an environment without max_turns": environment("pass", r"task: Mine has an environment and max_turns=None; expected an integer of at least 1", turns="pass"),
    "max_turns of 0": environment("pass", r"task: Mine has an environment and max_turns=0; expected an integer of at least 1", turns="max_turns = 0"),
    "an environment that raises": environment("return message.text", r"task: the environment of Mine fails at turn 1 of problem 'sum-0', '.*': AttributeError: .*\. Fix: repair its `step`, or raise grader.timeout_s=10 "),
    "an environment that hangs": environment("time.sleep(60)", r"task: the environment of Mine fails at turn 1 .*: no answer within 0.5 s; .*grader.timeout_s=0.5", "grader.timeout_s=0.5"),
    "an environment without step": task("max_turns = 3\ndef environment(self, problem, seed): return object()", r"the environment of Mine fails at turn 1 .*: AttributeError: 'object' object has no attribute 'step'"),
    "an environment that returns text": environment("return 'go on'", r"the environment of Mine fails at turn 1 .*: step returned str; expected an EnvironmentReply of torchtune_ext.tasks.task"),
    "an environment that is the assistant": environment("from torchtune_ext.tasks.task import EnvironmentReply\nreturn EnvironmentReply([{'role': 'assistant', 'content': 'x'}])", r"step returned a message of the assistant, whose turns only the policy writes"),
    "an environment whose reward is no number": environment("from torchtune_ext.tasks.task import EnvironmentReply\nreturn EnvironmentReply(reward='much', done=True)", r"the environment of Mine fails at turn 1 .*reward='much', which is not a number"),
    "an environment that pays nothing": environment("from torchtune_ext.tasks.task import EnvironmentReply\nreturn EnvironmentReply(done=True)", r"task: the environment of Mine gives the reward 0 to the solution of problem 'sum-0'; expected another reward. Fix: correct `environment` or"),
    "grade raises": task("def grade(self, problem, text): return problem.anser", r"task: Mine cannot grade the solution of problem 'sum-0': AttributeError: .*\(mine.py:8\); none of the first 4 problems can be graded"),
    "grade returns None": task("def grade(self, problem, text): pass", r"task: Mine cannot grade the solution of problem 'sum-0': .*None"),
    "grade returns NaN": task("def grade(self, problem, text): return Score(float('nan'), {})", r"task: Mine cannot grade the solution of problem 'sum-0': .*nan.*not finite"),
    "grade hangs": task("def grade(self, problem, text): time.sleep(60)", r"task: Mine took more than grader.timeout_s=0.5 to grade the solution of problem 'sum-0'\. Fix: raise grader.timeout_s", words="grader.timeout_s=0.5"),
    "grade ends its process": task("def grade(self, problem, text): os._exit(3)", r"task: Mine cannot grade the solution of problem 'sum-0': the grading process died"),
    "grade without a solution raises": alone(f"{LENGTH}\n{GET}\ndef grade(self, problem, text): return text.foo", r"task: Mine cannot grade the text '1' of problem '0': AttributeError: .*\(mine.py:7\)"),
    "a solution that does not score": task("def solution(self, problem): return 'who knows'", r"task: Mine gives the reward 0 to the solution of problem 'sum-0'; expected more than 1, .*'1'. Fix: correct `grade` or"),
    "a lock in the task": task("def __init__(self):\n    super().__init__()\n    self.lock = __import__('threading').Lock()", r"task Mine cannot be pickled: TypeError: .*Fix: keep open files, locks and models out of its attributes"),
    "a held-out task by its name": full("evaluation.task=sums.Base", r"`evaluation\.task:` needs a `_component_`, the dotted path of a class or function: evaluation\.task\._component_=sums\.Base, or evaluation\.task=null"),
    "a held-out task without an end": full(f"evaluation.task._component_={ARITHMETIC} ~evaluation.task.count", r"evaluation.task: Arithmetic never ends \(2,147,483,647 problems\), but `evaluation.task` uses all of them\. Fix: set evaluation.task.count=256"),
    "a level that is not there": full(f"task._component_={ARITHMETIC} task.level=99", r"task.level=\{99: 1.0\}: invalid. Fix: give a level from 1 to 10"),
    "a split that is not there": full(f"task._component_={ARITHMETIC} task.split=test", r"task.split='test': unknown. Fix: choose one of train, heldout, all", real=True),
    "warmup: no solution": warmup("task._component_=mine.Mine", r"task: Mine has no `solution`\. Fix: define it to return a text with reward 1.0", files={"mine.py": f"from sums import Problem, Score\n\n\nclass Mine:\n    {LENGTH}\n    {GET}\n    {GRADE}\n"}),
    "evaluate: grade raises": evaluate("task._component_=mine.Mine", r"task: Mine cannot grade the solution of problem 'sum-0': AttributeError: ", files={"mine.py": "from sums import Base\n\n\nclass Mine(Base):\n    def grade(self, problem, text): return text.foo\n"}),
    "a kernel that is not there": full(f"task._component_={MATMUL} 'task.kernels={{dgem: 256}}'", r"task.kernels: unknown kernel 'dgem'; use dgemm"),
    "a reward that is not there": full(f"task._component_={MATMUL} task.reward=speed", r"task.reward='speed': unknown. Fix: choose one of .*peak_share"),
    "a loss that cannot be called": full("loss._component_=sums.Base", r"loss: Base is not callable\. Fix: define `def __call__\(self, t\)` \(docs/how_to/algorithms.md\)"),
    "a loss with a wrong name": loss("def __call__(self, t): return -t.advantage, {}", r"loss: Mine, called with three labels, raised AttributeError: .*\(mine.py:2\)"),
    "a loss of one value": loss("def __call__(self, t): return (t.logprobs_L * t.advantages_L).mean(), {}", r"loss: Mine: its loss has shape \(\) for three labels. Fix: return one value per label, shape \(3,\)"),
    "a loss without metrics": loss("def __call__(self, t): return -t.logprobs_L", r"loss: Mine returned a Tensor\. Fix: return \(one value per label, a dict of metrics, which may be empty\)"),
    "a metric with the name of the loss": loss("def __call__(self, t): return -t.logprobs_L, {'total': t.logprobs_L}", r"loss: Mine: the metric 'total' is the loss itself \(loss/total\). Fix: give it another name"),
    "a loss without a gradient": loss("def __call__(self, t): return -t.advantages_L, {}", r"loss: Mine: its loss of three labels has no gradient. Fix: compute it from t.logprobs_L"),
    "a loss that needs a label": loss("def __call__(self, t): return -t.logprobs_L * t.advantages_L.max(), {}", r"loss: Mine, called with no labels \(an empty row\), raised .*max"),
    "a metric of one value": loss("def __call__(self, t): return -t.logprobs_L, {'mean': t.logprobs_L.mean()}", r"loss: Mine: metric 'mean' has shape \(\) for three labels"),
    "a loss that asks for no reference": loss("def __init__(self, kl_coef): pass\ndef __call__(self, t): return -t.logprobs_L, {}", r"loss.kl_coef=0.1, but the loss mine.Mine does not request it: give the class the attribute `needs_reference`", words="loss.kl_coef=0.1"),
    "not an optimizer": full("optimizer._component_=mine.Own", r"optimizer: Own is not a torch optimizer: it has no param_groups. Fix: name a class such as torch.optim.AdamW", files={"mine.py": "class Own:\n    def __init__(self, params, lr): pass\n"}),
    "an optimizer that needs a closure": full("optimizer._component_=torch.optim.LBFGS", r"optimizer: a step of LBFGS on dense gradients raised TypeError: .*. Fix: use torch.optim.AdamW, or change the settings"),
    "warmup: an optimizer of sparse gradients": warmup("optimizer._component_=torch.optim.SparseAdam", r"optimizer: a step of SparseAdam on dense gradients raised "),
    "content that is not text": task("def __getitem__(self, i): return Problem('x', ({'role': 'user', 'content': {'a': 1}},), 1)", r"problem 'x': the content of its message of role 'user' is \{'a': 1\}; expected a string"),
    "an optimizer that raises": full("optimizer._component_=mine.Own", r"`optimizer:` mine.Own raised ZeroDivisionError: division by zero \(mine.py:3\)", files={"mine.py": "class Own:\n    def __init__(self, params, lr):\n        1 / 0\n"}),
    "missing puzzles": full(f"task._component_={CLUE} task.path=data/train.jsonl", r"task.path='data/train.jsonl': file not found in .*Fix: `torchtune-ext clue --size public --count 3000 --out data/train.jsonl`", real=True),
    "missing held-out puzzles": full(f"evaluation.task._component_={CLUE} evaluation.task.path=data/val.json evaluation.task.count=64", r"evaluation.task.path='data/val.json': file not found in .*Fix: `torchtune-ext clue --size public --seed 1 --count 64 --out data/val.json`"),
    "not puzzles": full(f"task._component_={CLUE} task.path=rows.jsonl", r"rows.jsonl:1: field 'num_clues' is missing", files={"rows.jsonl": ROWS}),
    "rows that are not there": full(f"task._component_={JSONL} task.path=rows.jsonl task.grader=mine.same", r"task.path='rows.jsonl': file not found in ", files={"mine.py": "def same(problem, text): return 1.0\n"}),
    "a row that is no JSON": full(f"task._component_={JSONL} task.path=rows.jsonl task.grader=mine.same", r"rows.jsonl:2: not JSON \(.*\)\. Fix: write one object per line", files={"mine.py": "def same(problem, text): return 1.0\n", "rows.jsonl": ROWS + "{oops\n"}),
    "a field that is not there": full(f"task._component_={JSONL} task.path=rows.jsonl task.question=prompt task.grader=mine.same", r"rows.jsonl:1: missing field 'prompt'; fields: ", files={"mine.py": "def same(problem, text): return 1.0\n", "rows.jsonl": ROWS}),
    "rows in a folder": rows("model", r"task.path='model': a directory\. Fix: name a file in it"),
    "rows behind a URL": rows("https://a.org/q.jsonl", r"task.path='https://a.org/q.jsonl': not a local file\. Fix: download it first"),
    "rows of the hub": rows("openai/gsm8k", r"task.path='openai/gsm8k': file not found in .*Fix: .*hub: openai/gsm8k"),
    "rows below $HOME": rows("'$HOME/q.jsonl'", r"task.path=\$HOME/q.jsonl: `\$` is shell syntax, .* write \$\{oc.env:NAME\}"),
    "rows of chat messages, not named": rows("chat.jsonl", r"chat.jsonl:1: missing field 'question'; fields: messages, answer\. Fix: set question=NAME"),
    "chats that end with an answer": rows("chat.jsonl task.question=messages", r"chat.jsonl:1: the last message of 'messages' has role 'assistant'; .*Fix: end a question with the user's message"),
    "a field of answers that is not there": rows("rows.jsonl task.answer=completion", r"rows.jsonl:1: missing field 'completion'; fields: .*\. Fix: set answer=NAME"),
    "CSV under another name": rows("rows.txt", r"rows.txt:1: not JSON \(.*\)\. Fix: write one object per line, or name a file with the ending .parquet, .csv, .tsv or .jsonl"),
    "broken CSV": rows("rows.csv", r"task.path='rows.csv': not CSV \(.*\)\. Fix: separate values with commas, and quote strings"),
    "a grader that takes an answer": full(f"task._component_={JSONL} task.path=rows.jsonl task.grader=mine.same", r"its first parameter is `answer`; expected `problem`", files={"mine.py": "def same(answer, text): return 1.0\n", "rows.jsonl": ROWS}),
    "a grader that is not there": full(f"task._component_={JSONL} task.path=rows.jsonl task.grader=mine.sam", r"mine.*sam", files={"mine.py": "def same(problem, text): return 1.0\n", "rows.jsonl": ROWS}),
}
# fmt: on


def changed(**keys):
    """Change keys of config.json; None removes a key."""

    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        config = json.loads(file.read_text()) | keys
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def written(name: str, data: bytes):
    return lambda folder: (folder / "model" / name).write_bytes(data)


def removed(name: str):
    return lambda folder: (folder / "model" / name).unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model" / "model.safetensors", 50_000)


def one_less(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def one_more(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.2.input_layernorm.weight": tensors["model.norm.weight"].clone()}, file)


def foreign(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    save_file({"transformer.h.0.attn.weight": load_file(file)["model.norm.weight"]}, file)


def indexed(folder: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def other_tokenizer(folder: Path) -> None:
    """A second directory whose tokenizer swaps two letters."""
    shutil.copytree(folder / "model", folder / "other")
    file = folder / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["="] = vocabulary["="], vocabulary["7"]
    file.write_text(json.dumps(tokenizer))


# fmt: off
MODELS = {
    "folder not found": full("model_dir=models/none", r"model_dir='models/none': folder not found, relative to /.*; set it to a directory in Hugging Face format: `hf download OWNER/none --local-dir models/none`"),
    "a name of the hub": full("model_dir=Qwen/Qwen2.5-7B-Instruct", r"model_dir='Qwen/Qwen2.5-7B-Instruct': folder not found, .*`hf download Qwen/Qwen2.5-7B-Instruct --local-dir models/Qwen2.5-7B-Instruct`.*set model_dir=models/Qwen2.5-7B-Instruct"),
    "a model that no warm-up made": full("model_dir=runs/tiny/warmup/model", r"model_dir='runs/tiny/warmup/model': folder not found, .*`tune run warmup_sft --config warmup/tiny` creates it"),
    "a checkpoint that is not there": full("model_dir=out/checkpoints/step_000009", r"model_dir='out/checkpoints/step_000009': folder not found, .*; the checkpoints in out/checkpoints are step_000003, step_000006", prepare=lambda folder: [(folder / f"out/checkpoints/step_00000{step}").mkdir(parents=True) for step in (3, 6)]),
    "a file": full("model_dir=sums.py", r"model_dir='sums.py': it is a file; set it to a model directory"),
    "a folder without config.json": full("model_dir=.", r"model_dir='.': has no config.json; set it to a directory in Hugging Face format"),
    "config.json is broken": full("", r"model/config.json is not JSON in UTF-8 \(.*\)\. Fix: copy the file again", prepare=written("config.json", b'{"model_type": ')),
    "config.json is a list": full("", r"model/config.json holds \[\]; expected a JSON object", prepare=written("config.json", b"[]")),
    "another architecture": full("", r"model/config.json has model_type='gpt2', which is not supported; use a model of one of these types: gemma2, gemma3_text, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3", prepare=changed(model_type="gpt2")),
    "a size that is a text": full("", r"model/config.json has hidden_size='64'; expected a whole number above 0", prepare=changed(hidden_size="64")),
    "no layers": full("", r"model/config.json has num_hidden_layers=0; expected a whole number above 0", prepare=changed(num_hidden_layers=0)),
    "a method in place of its settings": full("", r"model/config.json has quantization_config='awq'; expected a JSON object", prepare=changed(quantization_config="awq")),
    "heads that do not divide the width": full("", r"has hidden_size=64, which is not a multiple of num_attention_heads=3, as torchtune's attention needs; use another", prepare=changed(num_attention_heads=3)),
    "an end token as a text": full("", r"model/generation_config.json: eos_token_id='</s>'; expected the id of a token", prepare=written("generation_config.json", b'{"eos_token_id": "</s>"}')),
    "an end token beyond the vocabulary": full("", r"generation_config.json or config.json in model has eos_token_id=99999, but the model in model_dir=model has ids from 0 to \d+: no completion", prepare=written("generation_config.json", b'{"eos_token_id": 99999}')),
    "an empty generation_config.json": full("", r"model/generation_config.json is empty\. Fix: copy the file again", prepare=written("generation_config.json", b"")),
    "a pointer of Git LFS": full("", r"model/model.safetensors is a pointer of Git LFS, not the file itself. Fix: run `git lfs pull` in model", prepare=written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")),
    "weights of something else beside the model's": full("", r"holds optimizer.safetensors in addition to the model's weights, and no model.safetensors.index.json says which files belong to the model; move optimizer.safetensors", prepare=written("optimizer.safetensors", b"")),
    "no weights": full("", r"model_dir='model' has no \*.safetensors file: `hf download OWNER/model --local-dir model`", prepare=removed("model.safetensors")),
    "weights of another format": full("", r"model_dir='model' has no \*.safetensors file \(found pytorch_model.bin, an unsupported format\)", prepare=lambda folder: (folder / "model/model.safetensors").rename(folder / "model/pytorch_model.bin")),
    "random bytes": full("", r"model/model.safetensors is not a safetensors file, or its header is damaged\. Fix: copy it again", prepare=written("model.safetensors", bytes(range(256)) * 64), real=True),
    "an empty file": full("", r"model/model.safetensors is not a safetensors file, or its header is damaged", prepare=written("model.safetensors", b"")),
    "a truncated file": full("", r"model/model.safetensors has 50,000 bytes; expected [\d,]+ from its header\. Fix: copy the file again", prepare=cut),
    "a missing file of several": full("", r"model_dir='model' lacks model-00002-of-00002.safetensors \(1 of 2 files are missing\), which model.safetensors.index.json names: the download is incomplete", prepare=indexed),
    "a missing weight": full("", r"model_dir='model' lacks 1 of the model's weights \(norm.scale\)", prepare=one_less),
    "a weight too many": full("", r"model does not fit model_dir='model': layers.2.sa_norm.scale has shape \(64,\) in model.safetensors, the built model has no weight of this name", prepare=one_more),
    "weights of another family": full("", r"model/model.safetensors: unknown weight transformer.h.0.attn.weight of shape \(64,\) for model_type=qwen2. Fix: copy config.json", prepare=foreign),
    "wrong shapes": full("", r"model does not fit model_dir='model': .* has shape \(.*\) in model.safetensors, the built model has shape \(.*\); compare `model:` in the YAML with model/config.json", prepare=changed(intermediate_size=96)),
    "tied in one of two": full("", r"model_dir='model' lacks 1 of the model's weights|tie_word_embeddings=False", prepare=changed(tie_word_embeddings=False)),
    "quantized weights": full("", r"model_dir='model' holds quantized weights .*quant_method='awq'\): use the model in bfloat16", prepare=changed(quantization_config={"quant_method": "awq"})),
    "no tokenizer": full("", r"no tokenizer.json in 'model'\. Fix: set it to a Hugging Face model directory with its tokenizer", prepare=removed("tokenizer.json")),
    "no chat template": full("", r"no chat template in 'model' .*Fix: set `template` to a Jinja file, or to 'chatml'", prepare=removed("chat_template.jinja")),
    "a template that is not there": full("tokenizer.template=mine.jinja", r"tokenizer.template='mine.jinja': not a file, 'chatml' or a Jinja text"),
    "an unknown history": full("tokenizer.history=strip", r"tokenizer.history='strip': unknown. Fix: use 'sampled', .* or 'template', .*; dropping thoughts only in training would change the context"),
    "the tokenizer of another model": full("tokenizer.path=other", r"tokenizer.path=other encodes text differently from the tokenizer in model_dir=model; they do not belong together: set tokenizer.path=model", prepare=other_tokenizer),
    "a tokenizer with more tokens": full("", r"tokenizer.path=model has ids up to \d+ \(such as .*\), but the model in model_dir=model has 64; they were added to the tokenizer but not to the model", prepare=changed(vocab_size=64)),
    "output_dir is a file": full("output_dir=sums.py", r"output_dir=sums.py: sums.py is not a folder. Fix: choose another output_dir"),
    "evaluate: folder not found": evaluate("model_dir=models/none", r"model_dir='models/none': folder not found, relative to "),
    "evaluate: random bytes": evaluate("", r"model/model.safetensors is not a safetensors file", prepare=written("model.safetensors", b"random" * 99)),
    "a template that drops the question": full("tokenizer.template=mine.jinja", r"task: Base\(...\)\[0\]: the chat template 'mine.jinja' omits its message of role 'user', '0\+1='\. Fix: set tokenizer.template", files={"mine.jinja": "{% for m in messages %}{{ m.content.text }}{% endfor %}"}),
    "warmup: a template that drops the question": warmup("model_dir=model tokenizer.template=mine.jinja", r"task: Base\(...\)\[0\]: the chat template 'mine.jinja' omits its message of role 'user'", files={"mine.jinja": "{% for m in messages %}{{ m.role }}{% endfor %}"}),
    "warmup: folder not found": warmup("model_dir=models/none", r"model_dir='models/none': folder not found, relative to "),
    "warmup: a truncated file": warmup("model_dir=model", r"model/model.safetensors has 50,000 bytes", prepare=cut),
}
# fmt: on
