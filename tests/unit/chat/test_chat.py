"""chat.py against recorded `apply_chat_template` results, transformers' own masks, and difficult templates."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.tool_calls import ToolCall, parse_tool_calls

ROOT = Path(__file__).resolve().parents[3]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Untagged templates of our own, each difficult in one way.
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Past turns lose their thinking; the newest always gets a thinking block. No prefix of one rendering is one of another.
FORGETS = """{% for m in messages %}{% set c = m.content %}{% set t = '' %}
{%- if '</think>' in c %}{% set t = c.split('</think>')[0].split('<think>')[-1] %}
{%- set c = c.split('</think>')[-1] %}{% endif -%}
<|im_start|>{{ m.role }}|{% if m.role == 'assistant' and loop.last %}<think>{{ t }}</think>{% endif %}{{ c }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"""
# No branch for any role: one expression renders all of them.
ROLE_BLIND = (
    "{% for m in messages %}{% set c = '[' + m['role'] + ']' + m['content'] | trim + '<|im_end|>' %}"
    "{{ c }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
ALWAYS_DROPS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
COUNTS = "{{ messages|length }} messages\n" + PLAIN


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A byte-level tokenizer with one merge, two newlines, and ChatML's special tokens; no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return path


def block_mask(tokenizer: ChatTokenizer, *arguments) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and the mask of whole generation blocks, as `apply_chat_template` counts it."""
    conversation = tokenizer.template.render_conversation(*arguments)
    ids, offsets = tokenizer._encode_pieces(conversation.text, [])
    return ids, [any(begin < turn.end and end > turn.start for turn in conversation.turns) for begin, end in offsets]


def marked(tokenizer: ChatTokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of each run of marked tokens."""
    runs: list[list[int]] = []
    for t, (token, is_marked) in enumerate(zip(ids, mask, strict=True)):
        if is_marked:
            if t == 0 or not mask[t - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer._tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# ---- the real templates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_recorded_vectors(data_dir, qwen_dir, family):
    """All 72 recorded rows: text and ids of the original templates; text, ids and mask of their training variants."""
    rows = json.loads((data_dir / "chat-templates/vectors.json").read_text())
    tokenizer = ChatTokenizer(qwen_dir, template=str(data_dir / f"chat-templates/{family}.jinja"))
    assert tokenizer.stop_token_ids == (151645,)  # no config names it: it is the token that ends a turn
    count = 0
    for row in rows:
        arguments = row["messages"], row["tools"], row["add_generation_prompt"]
        if row["template"] == family:
            text = tokenizer.template.render(*arguments)
            assert (text, tokenizer.encode(text)) == (row["text"], row["input_ids"]), row["name"]
        elif row["template"] == f"{family}_training":
            assert tokenizer.template.render_conversation(*arguments).text == row["text"], row["name"]
            ids, mask = block_mask(tokenizer, *arguments)
            assert (ids, [int(m) for m in mask]) == (row["input_ids"], row["assistant_mask"]), row["name"]
        else:
            continue
        count += 1
    assert count == 24


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_tool_results_are_appended_after_sampled_call(data_dir, qwen_dir, family):
    """The ids that are appended make the conversation that the template writes as a whole, with the call as an object."""
    tokenizer = ChatTokenizer(qwen_dir, template=str(data_dir / f"chat-templates/{family}.jinja"))
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = ({"type": "function", "function": {"name": "double", "description": "2a", "parameters": parameters}},)
    call = '<tool_call>\n{"name": "double", "arguments": {"a": 1}}\n</tool_call>'
    sampled = tokenizer.encode(f"{call}<|im_end|>")
    assert tokenizer.decode(sampled) == call
    assert parse_tool_calls(call) == [ToolCall("double", {"a": 1})]
    user, results = conversation("1+1?"), [{"role": "tool", "content": "2"}, {"role": "tool", "content": "two"}]
    ids = [*tokenizer.prompt_ids(user, tools), *sampled, *tokenizer.turn_boundary_ids(results, sampled[-1], tools)]
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "double", "arguments": {"a": 1}}]}
    assert ids == tokenizer.prompt_ids([*user, turn, *results], tools) != tokenizer.prompt_ids([*user, turn, *results])


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_sampled_tokens_of_the_real_templates(data_dir, qwen_dir, family):
    """The mask begins where the engine's prompt ends, and each turn's ends with the token at which the engine stops."""
    tokenizer = ChatTokenizer(qwen_dir, template=str(data_dir / f"chat-templates/{family}.jinja"))
    rows = json.loads((data_dir / "chat-templates/vectors.json").read_text())
    for row in rows:
        if row["template"] != f"{family}_training" or row["add_generation_prompt"]:
            continue
        ids, mask = tokenizer.conversation_ids(row["messages"], row["tools"])
        runs = marked(tokenizer, ids, mask)
        assert len(runs) == sum(message["role"] == "assistant" for message in row["messages"])
        assert all(run.endswith("<|im_end|>") for run in runs), row["name"]
        if len(runs) == 1:
            prompt = tokenizer.prompt_ids(row["messages"][:-1], row["tools"])
            assert ids[: len(prompt)] == prompt and mask.index(True) == len(prompt), row["name"]


def test_thinking_switched_off_is_part_of_the_prompt(data_dir, qwen_dir):
    template = str(data_dir / "chat-templates/qwen3.jinja")
    tokenizer = ChatTokenizer(qwen_dir, template, template_options={"enable_thinking": False})
    ids, mask = tokenizer.conversation_ids(conversation("2+2?", "4"))
    assert marked(tokenizer, ids, mask) == ["4<|im_end|>"]
    assert ids[: mask.index(True)] == tokenizer.prompt_ids(conversation("2+2?"))


# ---- templates of our own -----------------------------------------------------------------------------------------


def test_chatml_is_small_and_marks_text_and_end(model_dir):
    tokenizer = ChatTokenizer(model_dir, "chatml")
    messages = [{"role": "system", "content": "s"}, *conversation("a", "b", "c", "d")]
    ids, mask = tokenizer.conversation_ids(messages)
    assert marked(tokenizer, ids, mask) == ["b<|im_end|>", "d<|im_end|>"]
    text = tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>system\ns<|im_end|><|im_start|>user\na<|im_end|><|im_start|>assistant\nb<|im_end|>"
    )
    assert tokenizer.prompt_ids(messages[:4]) == ids[: len(ids) - 2]  # "d" and the end token are what is left to sample


def test_chatml_mask_is_the_one_of_transformers(model_dir):
    tokenizer = ChatTokenizer(model_dir, "chatml")
    messages = conversation("a", "b √ c", "c", "")
    reference = tokenizer._tokenizer.apply_chat_template(
        messages, chat_template=tokenizer.template.source, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = block_mask(tokenizer, messages)
    assert (ids, [int(m) for m in mask]) == (reference["input_ids"], reference["assistant_masks"])


def test_untagged_template_keeps_the_newline_out(model_dir):
    tokenizer = ChatTokenizer(model_dir, PLAIN)
    messages = conversation("a", "b", "c", "d")
    ids, mask = tokenizer.conversation_ids(messages)
    assert marked(tokenizer, ids, mask) == ["b<|im_end|>", "d<|im_end|>"]
    wide = block_mask(tokenizer, messages)
    assert wide[0] == ids == tokenizer.encode(tokenizer.template.render(messages))
    assert marked(tokenizer, *wide) == ["b<|im_end|>\n", "d<|im_end|>\n"]


def test_thinking_of_past_turns_is_kept(model_dir):
    tokenizer = ChatTokenizer(model_dir, FORGETS)
    messages = conversation("a", "<think>1</think>b", "c", "d", "e", "<think>3</think>f")
    assert "1" not in tokenizer.template.render(messages)
    ids, mask = tokenizer.conversation_ids(messages)
    assert marked(tokenizer, ids, mask) == [
        "<think>1</think>b<|im_end|>",
        "<think></think>d<|im_end|>",
        "<think>3</think>f<|im_end|>",
    ]
    ids, _ = tokenizer.conversation_ids(messages[:5], add_generation_prompt=True)
    assert tokenizer._tokenizer.decode(ids).endswith("e<|im_end|>\n<|im_start|>assistant|")


def test_template_without_any_branch_for_roles(model_dir):
    tokenizer = ChatTokenizer(model_dir, ROLE_BLIND)
    ids, mask = tokenizer.conversation_ids(conversation("a", " b ", "c", "d"))
    assert marked(tokenizer, ids, mask) == ["b<|im_end|>", "d<|im_end|>"]


def test_conversation_consecutive_and_missing_assistant_turns(model_dir):
    tokenizer = ChatTokenizer(model_dir, PLAIN)
    twice = [*conversation("a", "b"), {"role": "assistant", "content": "c"}]
    assert marked(tokenizer, *tokenizer.conversation_ids(twice)) == ["b<|im_end|>", "c<|im_end|>"]
    ids, mask = tokenizer.conversation_ids(conversation("a"), add_generation_prompt=True)
    assert ids == tokenizer.prompt_ids(conversation("a")) and not any(mask)


@settings(max_examples=60)
@given(question=st.text(max_size=12), answer=st.text(max_size=12))
@pytest.mark.parametrize("template", ["chatml", PLAIN], ids=["chatml", "plain"])
def test_training_ids_continue_the_prompt(model_dir, template, question, answer):
    """Whatever the texts (a newline at a seam, say), the ids begin with the prompt's and end with the answer's."""
    tokenizer = _cached(model_dir, template)
    messages = conversation(question, answer)
    ids, mask = tokenizer.conversation_ids(messages)
    prompt = tokenizer.prompt_ids(messages[:1])
    num_marked = sum(mask)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + num_marked] == [False] * len(prompt) + [True] * num_marked
    if not any(token in answer for token in SPECIAL):
        assert tokenizer.decode(ids[len(prompt) : len(prompt) + num_marked]) == answer
    assert ids[len(prompt) + num_marked - 1] == tokenizer._tokenizer.convert_tokens_to_ids("<|im_end|>")


_made: dict[str, ChatTokenizer] = {}


def _cached(model_dir: Path, template: str) -> ChatTokenizer:
    return _made.setdefault(template, ChatTokenizer(model_dir, template))


def test_conversation_token_across_boundary_is_split(model_dir):
    """ "\\n" + "\\n" is one token of this vocabulary, which the engine could never sample behind its prompt."""
    tokenizer = ChatTokenizer(model_dir, PLAIN)
    messages = conversation("a", "\nb")
    ids, mask = tokenizer.conversation_ids(messages)
    assert marked(tokenizer, ids, mask) == ["\nb<|im_end|>"]
    assert len(ids) == len(block_mask(tokenizer, messages)[0]) + 1


def test_conversation_prompt_ids_equal_standalone_prompt_ids(model_dir, tmp_path):
    """GPT-2's rule cuts "\\n\\n" in two before a word, and not at the end of a prompt. No token is over the seam."""
    vocabulary = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(
        tmp_path, PLAIN.replace("m.role }}\n", "m.role }}\n\n").replace("assistant\n", "assistant\n\n")
    )
    ids, mask = tokenizer.conversation_ids(conversation("a", "b"))
    prompt = tokenizer.prompt_ids(conversation("a"))
    assert ids[: mask.index(True)] == prompt and tokenizer.decode(prompt[-1:]) == "\n\n"
    assert marked(tokenizer, ids, mask) == ["b<|im_end|>"]


# As Gemma's: no system role (Gemma 2 raises, Gemma 3 writes it into the first user turn), and the assistant is `model`.
GEMMA = """{%- set prefix = '' -%}{%- if messages[0].role == 'system' -%}SYSTEM{%- set messages = messages[1:] -%}{%- endif -%}
{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles alternate') }}
{%- endif -%}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (prefix if loop.first else '') }}
{{- m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
GEMMA_2 = GEMMA.replace("SYSTEM", "{{ raise_exception('System role not supported') }}")
GEMMA_3 = GEMMA.replace("SYSTEM", "{%- set prefix = messages[0].content + '\n\n' -%}")


def test_gemma_templates_refuse_or_fold_the_system_role(model_dir):
    asked = [{"role": "system", "content": "s"}, *conversation("a", "b", "c", "d")]
    tokenizer = ChatTokenizer(model_dir, GEMMA_3)
    ids, mask = tokenizer.conversation_ids(asked)
    assert marked(tokenizer, ids, mask) == ["b<end_of_turn>\n", "d<end_of_turn>\n"]
    assert tokenizer.decode_all(ids).startswith("<start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>model\nb")
    refusing = ChatTokenizer(model_dir, GEMMA_2)
    with pytest.raises(ValueError, match=r"roles \['system', 'user'.*System role not supported.*change the messages"):
        refusing.prompt_ids(asked[:2])
    assert refusing.conversation_ids(asked[1:])[0] == tokenizer.conversation_ids(asked[1:])[0]


# ---- ids and files ------------------------------------------------------------------------------------------------


def test_special_ids(model_dir, tmp_path):
    end_of_text, im_start, im_end = 257, 258, 259
    tokenizer = ChatTokenizer(model_dir, "chatml")
    assert tokenizer.stop_token_ids == (end_of_text, im_end)
    assert tokenizer.eos_id == tokenizer.pad_id == end_of_text  # no pad token: eos stands in
    assert tokenizer.vocab_size == 260
    ids = [im_start, *tokenizer.encode("hé "), im_end, end_of_text]
    assert tokenizer.decode(ids) == "hé "
    assert tokenizer.decode_all(ids) == "<|im_start|>hé <|im_end|><|endoftext|>"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [im_start, end_of_text]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    tokenizer = ChatTokenizer(tmp_path)
    assert tokenizer.template.source == PLAIN
    assert tokenizer.stop_token_ids == (im_end, im_start, end_of_text, 7)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (im_end, end_of_text)


def test_template_loads_from_file_and_tokenizer_config(model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|im_end|>", "chat_template": ROLE_BLIND}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTokenizer(tmp_path).template.source == ROLE_BLIND
    (tmp_path / "mine.jinja").write_text(PLAIN)
    assert ChatTokenizer(tmp_path, str(tmp_path / "mine.jinja")).template.source == PLAIN


def test_import_and_use_need_no_torch(model_dir):
    code = (
        "import sys; from torchtune_ext.chat import ChatTokenizer; "
        f"ChatTokenizer({str(model_dir)!r}, 'chatml').conversation_ids([{{'role': 'user', 'content': 'x'}}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_encode_text_beyond_model_length_without_warning(model_dir, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = ChatTokenizer(model_dir, "chatml")
    tokenizer._tokenizer.model_max_length = 4
    assert len(tokenizer.encode("x" * 10)) == 10 and not caplog.records


# ---- errors: never silent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (ALWAYS_DROPS, conversation("a", "<think>1</think>b"), ["message 1", "drops part", "{% generation %}"]),
        (COUNTS, conversation("a", "b"), ["does not write", "{% generation %}", "docs/how_to/dataset.md"]),
        (PLAIN + "{% if messages[-1].role == 'user' %}?{% endif %}", conversation("a", "b"), ["does not write"]),
        # what an assistant said is gone from the next prompt, so nothing tells where its turn ended
        (
            FORGETS.replace("{{ c }}<|im_end|>", "{{ c if loop.last or m.role == 'user' else '...' }}<|im_end|>"),
            conversation("a", "b", "c", "d"),
            ["the end of the turn of message 1"],
        ),
        # tags are there, and hold nothing of the assistant's
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN, conversation("a", "b"), ["found 0"]),
        (PLAIN + "{% generation %}{% endgeneration %}", conversation("a", "b"), ["with text in it"]),
        ("{{ raise_exception('users only') }}", conversation("a", "b"), ["users only", "['user'"]),
        ("{{ 'x' + nothing }}", conversation("a", "b"), ["'nothing' is undefined"]),
        ("{% for m in messages %}", conversation("a", "b"), ["cannot render"]),
    ],
)
def test_template_without_a_place_raises(model_dir, template, messages, words):
    tokenizer = ChatTokenizer(model_dir, template)
    with pytest.raises(ValueError) as caught:
        tokenizer.conversation_ids(messages)
    assert "chat template 'given as text'" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_prompts_work_where_conversations_do_not(model_dir):
    tokenizer = ChatTokenizer(model_dir, COUNTS)
    assert tokenizer.decode(tokenizer.prompt_ids(conversation("a"))).startswith("1 messages")


def test_half_a_character_is_named(model_dir):
    with pytest.raises(ValueError, match=r"surrogate pair .*'1\+1 \\ud83d'"):
        ChatTokenizer(model_dir, "chatml").encode("1+1 \ud83d?")


def test_missing_files_raise(model_dir, tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        ChatTokenizer(tmp_path / "nowhere", "chatml")
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatTokenizer(tmp_path, "chatml")
    with pytest.raises(ValueError, match="no chat template in .*'chatml' for the built-in"):
        ChatTokenizer(model_dir)
    with pytest.raises(ValueError, match="template='nowhere.jinja': not a file"):
        ChatTokenizer(model_dir, "nowhere.jinja")
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="has no end token"):
        ChatTokenizer(tmp_path, "{{ messages[0].content }}")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("generation_config.json", "", "generation_config.json is empty. Fix: copy the file again"),
        ("generation_config.json", "[]", r"generation_config.json holds \[\]; expected a JSON object"),
        ("generation_config.json", "null", "generation_config.json holds null; expected"),
        ("generation_config.json", "{'eos_token_id': 1}", "generation_config.json is not JSON in UTF-8"),
        ("generation_config.json", "[" * 100_000, "generation_config.json is not JSON in UTF-8"),
        ("generation_config.json", "\ufeff{}", "generation_config.json begins with a byte order mark"),
        ("generation_config.json", POINTER, "generation_config.json is a pointer of Git LFS.*git lfs pull"),
        ("config.json", "[1]", r"config.json holds \[1\]"),
        ("tokenizer.json", POINTER, "tokenizer.json is a pointer of Git LFS"),
        ("tokenizer.json", '{"model": ', "tokenizer.json is not JSON"),
        ("tokenizer.json", '{"model": 1}', "the tokenizer in .* cannot be loaded .*Fix: download its files again"),
        ("tokenizer_config.json", "", "tokenizer_config.json is empty"),
        ("tokenizer_config.json", "\ufeff{}", "tokenizer_config.json begins with a byte order mark"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds"),
        *(
            ("generation_config.json", f'{{"eos_token_id": {value}}}', "generation_config.json: eos_token_id=")
            for value in ('"</s>"', "true", "2.0", "[[1, 2]]", "-1", "{}", '[1, "x"]')
        ),
    ],
)
def test_damaged_file_of_a_model_folder_is_named(model_dir, tmp_path, name, content, message):
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        ChatTokenizer(tmp_path, "chatml")


def test_templates_of_a_folder_are_chosen_by_name(model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    templates = [{"name": "tool_use", "template": PLAIN}, {"name": "rag", "template": ROLE_BLIND}]
    config = {"eos_token": "<|im_end|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="tool_use, rag .*tokenizer.template"):
        ChatTokenizer(tmp_path)
    assert ChatTokenizer(tmp_path, "rag").template.source == ROLE_BLIND
    config["chat_template"].append({"name": "default", "template": FORGETS})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTokenizer(tmp_path).template.source == FORGETS


@pytest.mark.parametrize("name", ["tools", "chat_template", "messages", "add_generation_prompt", "conversations"])
def test_template_options_of_the_renderer_are_refused(model_dir, name):
    with pytest.raises(UsageError, match=f"tokenizer.template_options.{name}: .*remove it"):
        ChatTokenizer(model_dir, "chatml", template_options={name: []})


@pytest.mark.parametrize("value", [float("inf"), [float("nan")], {1}])
def test_template_options_without_json_are_refused(model_dir, value):
    with pytest.raises(UsageError, match="tokenizer.template_options=.*: not JSON"):
        ChatTokenizer(model_dir, "chatml", template_options={"deep": value})


@pytest.mark.parametrize("special", [False, True])
def test_the_marks_of_a_call_are_read(model_dir, tmp_path, special):
    """Some models have them for special tokens, which are left out of other texts."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    marks = "<tool_call>", "</tool_call>"
    add([AddedToken(token, special=special, normalized=False) for token in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = ChatTokenizer(tmp_path, template=PLAIN)
    text = f'{marks[0]}{{"name": "a"}}{marks[1]}'
    assert ours.decode(ours.encode(f"{text}<|im_end|>")) == text
