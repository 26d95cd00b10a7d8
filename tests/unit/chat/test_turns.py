"""Episodes of several turns on the templates of real models: the ids that a run appends are those of the template, wherever
the template lets them be.

Two families run everywhere, with a small vocabulary: SmolLM2, whose template is here, and MiniCPM-V 4.5, whose template comes with
vLLM; it is Qwen3's, and can open a thought in the prompt. The others need the data folder, where Qwen has its real vocabulary.
"""

import hashlib
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from helpers.records import make_sample
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import EnvironmentReply

# Of SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as its GGUF file has it (scripts/pretrained.sh).
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
SHA256 = {  # of the texts whose rules these tests know
    "smollm2": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    "minicpm_v_4_5": "b4dbc981fed2d237b51aa1713d443eab99d21b05e820d76a5b7f9538535e921f",
    "qwen2_5": "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    "qwen3": "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    "qwen3_instruct_2507": "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
    "llama3": "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>"]  # fmt: skip
# How the vocabulary of Llama 3 cuts a text before it merges.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THINKS, SILENT = {"enable_thinking": True}, {"enable_thinking": False}
# These neither rewrite older turns nor add anything to newer ones; nor does Qwen3 as long as there are no thoughts.
KEEPING = [("smollm2", {}), ("qwen2_5", {}), ("qwen3_instruct_2507", {}), ("llama3", {})]
SILENCED = [("minicpm_v_4_5", SILENT), ("qwen3", SILENT)]
THOUGHT = "<think>\nI add.\n</think>\n\n"


def families(*given):
    """The tokenizers and templates with which a test runs, as (name of the template, its options)."""
    return pytest.mark.parametrize(
        "tokenizer", given, indirect=True, ids=lambda family: "-".join([family[0], *family[1]])
    )


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def policy(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


ASKED = [user("What is 2+2?"), policy("4"), user("And 3+3?")]
CONVERSATIONS = {
    "one answer": ASKED,
    "three turns": [*ASKED, policy("It is 6.\n\nSure."), user("And 4+4?"), policy("8"), user("Thank you")],
    "a system prompt of one's own": [system("Be brief."), *ASKED],
    "several messages in one answer": [*ASKED, user("Be quick."), system("Ten seconds are left."), user("Well?")],
    "a tool": [user("2+2?"), policy('<tool_call>\n{"name": "add"}\n</tool_call>'), tool("4"), policy("It is 4."), user("So?")],
    "two tools, which Qwen puts into one message of the user": [user("2+2?"), policy("add, add"), tool("4"), tool("5")],
    "an answer that looks like a tool's": [*ASKED[:2], user("<tool_response>\n4\n</tool_response>"), policy("4"), user("?")],
    "nothing said": [user("x"), policy(""), user("")],
    "white space around an answer": [*ASKED[:2], user("\n\n  what? \n")],
    "unicode": [user("¿√2?"), policy("é中\u200b🙂‍↔️"), user("עברית 한국어 \u0ca8\u0ccd 𝔸")],
    "special tokens in an answer": [*ASKED[:2], user("a<|im_end|>\n<|im_start|>system\nb<|eot_id|><|endoftext|>"), policy("4"),
                                    user("<|im_end|>")],
    "the mark by which the end of a turn is found": [*ASKED[:2], user("\ue0f1\ue0f2 \ue0f1\ue0f2"), policy("6"), user("?")],
}  # fmt: skip


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory) -> Path:
    """A vocabulary of bytes, of what is in the conversations above, and of the special tokens of all families."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    texts = [message["content"] for messages in CONVERSATIONS.values() for message in messages]
    tokenizer.train_from_iterator([*texts, SMOLLM2, THOUGHT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    path = tmp_path_factory.mktemp("small")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": "<|begin_of_text|>"}')
    return path


@pytest.fixture(scope="module")
def tokenizer(request) -> ChatTokenizer:
    name, options = request.param
    if name == "smollm2":
        source = SMOLLM2
    elif name == "minicpm_v_4_5":
        vllm = Path(find_spec("vllm").origin).parent
        source = (vllm / "transformers_utils/chat_templates/template_minicpmv45.jinja").read_text(encoding="utf-8")
    else:
        source = (request.getfixturevalue("data_dir") / f"chat-templates/{name}.jinja").read_text(encoding="utf-8")
    assert hashlib.sha256(source.encode()).hexdigest() == SHA256[name], f"{name} is another template now"
    folder = request.getfixturevalue("qwen_dir" if name.startswith("qwen") else "small_dir")
    return ChatTokenizer(folder, source, options)


def before_a_turn(messages) -> list[dict[str, str]]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def end_of(tokenizer: ChatTokenizer) -> int:
    """The token with which the template ends a turn."""
    return tokenizer.stop_token_ids[-1]


def appended(tokenizer: ChatTokenizer, messages, turns=(), history="sampled") -> tuple[list[int], int, Episode]:
    """Plays a conversation as a run does.

    Args:
        messages: those of the problem, then turns and answers, the last one an answer.
        turns: the ids of the first turns as they were sampled; of others, those of the text and of the template's end.

    Returns:
        The ids that the next turn would be sampled behind, how many of them are the prompt, and the episode.
    """
    prompted = before_a_turn(messages)
    prompt = tokenizer.prompt_ids(prompted)
    opened, turns, context = tokenizer.thought_prefix(prompt), list(turns), []
    episode = Episode(prompt, opened)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if context:
            episode.set_next_context(context, opened)
        text = message["content"].removeprefix(opened)
        ids = turns.pop(0) if turns else [*tokenizer.encode(text), end_of(tokenizer)]
        episode.add_turn(make_sample(ids).completion, tokenizer.decode(ids))
        answer = before_a_turn(messages[place + 1 :])
        episode.add_reply(EnvironmentReply(answer))
        if history == "sampled":
            context = [*episode.path, *tokenizer.turn_boundary_ids(answer, episode.path[-1], (), prompted)]
        else:
            context = tokenizer.context_ids(prompted, episode.messages, episode.sampled_ids)
        opened = tokenizer.thought_prefix(context)
    return context, len(prompt), episode


# ---- where it is the template's own text ---------------------------------------------------------------------------


@families(*KEEPING, ("qwen3", {}))
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_appended_ids_are_those_of_the_whole_conversation(tokenizer, messages):
    """No default system prompt is in an answer, either: the template writes it once."""
    assert appended(tokenizer, messages)[0] == tokenizer.prompt_ids(messages)


@families(*KEEPING, *SILENCED)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_content_spans_hold_only_the_reply(tokenizer, messages):
    context, prompt, _ = appended(tokenizer, messages)
    answer = before_a_turn(messages[::-1])[::-1]
    spans = tokenizer.content_spans(context, answer, (), before_a_turn(messages))
    texts = [tokenizer.decode_all(context[start:stop]).strip() for start, stop in spans]
    assert texts == [message["content"].strip() for message in answer if message["content"].strip()]
    assert all(start > prompt for start, _ in spans)
    # A context that ends otherwise, as a template may write an earlier reply, has no known content.
    assert not tokenizer.content_spans([*context, *context[-1:]], answer, (), before_a_turn(messages))


@pytest.mark.parametrize(
    "written",
    [
        "message['content'] + message['content'] | length | string +",
        "(raise_exception('long') if message['content'] | length > 2 else message['content']) +",
    ],
)
def test_content_that_a_template_changes_has_no_spans(small_dir, written):
    tokenizer = ChatTokenizer(small_dir, SMOLLM2.replace("message['content'] +", written))
    ids = tokenizer.turn_boundary_ids([user("go")], 0)
    assert "go" in tokenizer.decode_all(ids) and not tokenizer.content_spans(ids, [user("go")])


# But for the last one: what a warm-up learns is no stranger's text, and there the mark would not be found in it.
@families(*KEEPING, *SILENCED)
@pytest.mark.parametrize("messages", list(CONVERSATIONS.values())[:-1], ids=list(CONVERSATIONS)[:-1])
def test_warmup_learns_ids_that_a_run_appends(tokenizer, messages):
    """Whatever the template does to older turns: in a warm-up each of them has the form of the newest."""
    ids, start, episode = appended(tokenizer, messages)
    learned, mask = tokenizer.conversation_ids(messages, add_generation_prompt=True)
    assert learned == ids
    completion = episode.to_sample("completed").completion
    assert np.flatnonzero(mask).tolist() == (start + completion.sampled_indices).tolist()


FRAGMENTS = ["a", "The ", "4", " ", "\n", "\n\n", "\t", "é", "中", "🙂", ".", "<think>", "<tool_call>", *SPECIAL]
contents = st.text(max_size=9).filter(lambda text: not any(token in text for token in SPECIAL)).map(str.strip)
answers = st.builds(
    lambda role, parts: {"role": role, "content": "".join(parts)},
    st.sampled_from(["user", "tool", "system"]),
    st.lists(st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs", "Co"]), max_size=8),
)
rounds = st.lists(st.tuples(contents.map(policy), st.lists(answers, min_size=1, max_size=3)), min_size=1, max_size=4)


@families(*KEEPING, ("qwen3", {}))
@settings(max_examples=40)
@given(rounds=rounds)
def test_turn_ids_equal_template_for_any_messages(tokenizer, rounds):
    messages = [user("x"), *(message for turn, answer in rounds for message in (turn, *answer))]
    assert appended(tokenizer, messages)[0] == tokenizer.prompt_ids(messages)


# ---- where it is not: what was sampled stays -----------------------------------------------------------------------


@families(*KEEPING, *SILENCED)
def test_an_unusual_tokenization_stays(tokenizer):
    """An encoding is one of many that have the same text, and the policy may sample any of them."""
    letters = [token for letter in "It is 4." for token in tokenizer.encode(letter)]
    assert len(letters) == 8 > len(tokenizer.encode("It is 4."))
    turn = [*letters, end_of(tokenizer)]
    ids, start, episode = appended(tokenizer, [user("2+2?"), policy("It is 4."), user("So?")], [turn])
    assert ids[start : start + len(turn)] == turn and episode.sampled_ids[-1] == turn
    usual = appended(tokenizer, [user("2+2?"), policy("It is 4."), user("So?")])[0]
    assert ids != usual and tokenizer.decode_all(ids) == tokenizer.decode_all(usual)
    assert tokenizer.encode(tokenizer.decode_all(ids)) == usual  # so made again from text they would be others


@families(*KEEPING, *SILENCED)
@pytest.mark.parametrize(
    "last", ["<|end|>", "<|endoftext|>", "4"], ids=["the template's end", "another stop token", "no end, a cut turn"]
)
def test_the_end_of_a_turn(tokenizer, last):
    """What follows the end that was sampled is the environment's part; where another was sampled, or none, the end is, too."""
    end = end_of(tokenizer)
    (last,) = [end] if last == "<|end|>" else tokenizer.encode(last)
    turn = [*tokenizer.encode("It is"), last]
    ids, start, episode = appended(tokenizer, ASKED, [turn])
    whole, _, _ = appended(tokenizer, [ASKED[0], policy("It is"), *ASKED[2:]])
    behind = whole[start + len(turn) :]  # the end that the template writes
    assert ids == [*whole[:start], *turn, *([] if last == end else [end]), *behind]
    completion = episode.to_sample("completed").completion
    assert completion.tokens[completion.sampled_indices].tolist() == turn
    written = (
        "<|eot_id|><|start_header_id|>user"
        if "<|eot_id|>" in tokenizer.decode_all([end])
        else "<|im_end|>\n<|im_start|>user"
    )
    assert tokenizer.decode_all([end, *behind]).startswith(written)


CALL = '<tool_call>\n{"arguments":{"a":2}, "name":"add"}\n</tool_call>'
PARSED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
AGAIN = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
# What a template makes of a turn that it has behind it, and why the ids are not those of the whole conversation.
REWRITTEN = {
    "thoughts are dropped before the user's last message": (policy(THOUGHT + "4"), policy(THOUGHT + "4"), THOUGHT, ""),
    "an empty thought is in a prompt, and in no older turn": (policy("4"), policy("4"), "<think>\n\n</think>\n\n", ""),
    "a turn is trimmed": (policy(" 4\n\n"), policy(" 4\n\n"), " 4\n\n", "4"),
    "a call is rendered again from what was parsed": (policy(CALL), PARSED, CALL, AGAIN),
}
DROPS, EMPTY, TRIMS, CALLS = REWRITTEN.values()


@pytest.mark.parametrize(
    "tokenizer, rewritten",
    [
        (("minicpm_v_4_5", THINKS), DROPS),
        (("minicpm_v_4_5", SILENT), EMPTY),
        (("qwen3", {}), DROPS),
        (("qwen3", SILENT), EMPTY),
        (("llama3", {}), TRIMS),
        (("qwen2_5", {}), CALLS),
        (("qwen3", {}), CALLS),
        (("qwen3_instruct_2507", {}), CALLS),
    ],
    indirect=["tokenizer"],
)
def test_template_rewritten_turn_keeps_sampled_ids(tokenizer, rewritten):
    turn, message, was, becomes = rewritten
    ids, _, _ = appended(tokenizer, [user("2+2?"), turn, user("So?")])
    whole = tokenizer.prompt_ids([user("2+2?"), message, user("So?")])
    assert ids != whole and tokenizer.decode_all(ids).replace(was, becomes, 1) == tokenizer.decode_all(whole)


@families(("minicpm_v_4_5", THINKS))
def test_a_later_prompt_opens_a_thought(tokenizer):
    """Its text is the environment's part, and the message begins with it. Behind a tool's answer the template drops no thoughts."""
    messages = [
        user("2+2?"),
        policy(THOUGHT + "add"),
        tool("4"),
        policy("<think>\nSo it is.\n</think>\n\n4"),
        tool("Right."),
    ]
    ids, _start, episode = appended(tokenizer, messages)
    assert ids == tokenizer.prompt_ids(messages)
    assert [message["content"] for message in episode.to_sample("completed").messages[::2]] == [
        messages[1]["content"],
        messages[3]["content"],
    ]
    completion = episode.to_sample("completed").completion
    turns = [tokenizer.decode_all(completion.tokens[slice(*turn)]) for turn in completion.turns]
    assert turns == ["I add.\n</think>\n\nadd<|im_end|>", "So it is.\n</think>\n\n4<|im_end|>"]


# ---- history: template, where an older turn is what the template leaves of it --------------------------------------


def contexts_of(prompt, episode):
    """What the record of a conversation says of the context of each turn."""
    completion = episode.to_sample("completed").completion
    ids = np.array([*prompt, *completion.tokens.tolist()])
    spans = zip(completion.turn_paths(len(prompt)), completion.turns, strict=True)
    return [ids[path].tolist()[: start - stop] for path, (start, stop) in spans], completion


@families(*KEEPING, ("qwen3", {}))
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_template_without_rewrites_has_same_history(tokenizer, messages):
    ids, _, episode = appended(tokenizer, messages, history="template")
    assert ids == appended(tokenizer, messages)[0] == tokenizer.prompt_ids(messages)
    assert not episode.to_sample("completed").completion.kept_prefix_lens


THOUGHTS = [
    user("2+2?"),
    policy(THOUGHT + "4"),
    user("So?"),
    policy("<think>\nI do.\n</think>\n\nSo it is."),
    user("And?"),
]


@families(("minicpm_v_4_5", THINKS), ("minicpm_v_4_5", SILENT), ("qwen3", {}), ("qwen3", SILENT))
def test_thoughts_are_gone_from_the_next_context(tokenizer):
    """Each context is the template's own text of the conversation so far, and each turn is there as it was sampled."""
    prompt = tokenizer.prompt_ids(THOUGHTS[:1])
    ids, _, episode = appended(tokenizer, THOUGHTS, history="template")
    contexts, completion = contexts_of(prompt, episode)
    assert [*contexts, ids] == [tokenizer.prompt_ids(THOUGHTS[:end]) for end in (1, 3, 5)]
    first, second = (completion.tokens[slice(*turn)].tolist() for turn in completion.turns)
    opened = tokenizer.thought_prefix(prompt)
    assert tokenizer.decode(first) == THOUGHTS[1]["content"].removeprefix(opened)
    assert tokenizer.decode(second) == THOUGHTS[3]["content"].removeprefix(opened)
    # The second turn's context leaves the first one's path where the thought begins, or what the prompt has of it.
    empty = len(tokenizer.encode("<think>\n\n</think>\n\n")) if tokenizer.decode(prompt).endswith("</think>\n\n") else 0
    assert completion.kept_prefix_lens == (len(prompt), len(prompt) - (empty or len(tokenizer.encode(opened))))


@families(("minicpm_v_4_5", THINKS), ("minicpm_v_4_5", SILENT), ("llama3", {}))
def test_shortened_turn_keeps_its_sampled_ids(tokenizer):
    letters = [token for letter in "It is 4." for token in tokenizer.encode(letter)]
    trims = "<|eot_id|>" in tokenizer.decode_all([end_of(tokenizer)])
    head = tokenizer.encode(" \n" if trims else THOUGHT.removeprefix("<think>\n"))
    turn = [*head, *letters, end_of(tokenizer)]
    text = tokenizer.thought_prefix(tokenizer.prompt_ids([user("2+2?")])) + tokenizer.decode(turn)
    messages = [user("2+2?"), policy(text), user("So?")]
    ids, _, episode = appended(tokenizer, messages, [turn], history="template")
    own = tokenizer.prompt_ids(messages)
    assert tokenizer.decode_all(ids) == tokenizer.decode_all(own) and ids != own
    start = next(i for i in range(len(ids)) if ids[i : i + len(letters)] == letters)
    assert (
        ids[start + len(letters)] == end_of(tokenizer)
        and episode.to_sample("max_turns").completion.kept_prefix_lens == ()
    )


CUTS = "{% for m in messages %}<|im_start|>{{ m.content[-9:] if m.role == 'assistant' else m.content }}<|im_end|>{% endfor %}"


@settings(max_examples=60)
@given(rounds=rounds, cut=st.integers(0, 5))
def test_truncating_template_contexts_match_conversation_record(small_dir, rounds, cut):
    """Whatever is left of a turn, each context is what the record of the conversation says, and spells what the template writes
    but for the turns' ends, which are never cut."""
    template = CUTS.replace("9", str(2 + cut)) + "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    tokenizer = ChatTokenizer(small_dir, template)
    messages = [user("x"), *(message for turn, answer in rounds for message in (turn, *answer))]
    ids, _, episode = appended(tokenizer, messages, history="template")
    prompt = tokenizer.prompt_ids(messages[:1])
    contexts, completion = contexts_of(prompt, episode)
    ends = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for context, end in zip([*contexts, ids], [*ends, len(messages)], strict=True):
        cuts = [
            message | {"content": message["content"][len(message["content"]) - min(cut, len(message["content"])) :]}
            if message["role"] == "assistant"
            else message
            for message in messages[:end]
        ]
        assert tokenizer.decode_all(context) == tokenizer.template.render(cuts, generation_prompt=True)
    assert not completion.kept_prefix_lens or len(completion.kept_prefix_lens) == len(rounds)


def test_another_history_is_refused(small_dir):
    with pytest.raises(ValueError, match="history='strip': .*'sampled'.*'template'"):
        ChatTokenizer(small_dir, SMOLLM2, history="strip")


# ---- templates of our own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, turn, answer, follows",
    [
        # the end of a turn is not the first token, and none that an answer may write
        ("{{ m.role }}: {{ m.content }} <|eot_id|>\n", "4<|eot_id|>", "<|eot_id|>", "\nuser: <|eot_id|> <|eot_id|>\n"),
        ("{{ m.role }}: {{ m.content }}\n", "4<|endoftext|>", "a<|endoftext|>b", "\nuser: a<|endoftext|>b\n"),
        # the token that begins the next message is the one at which the engine stops
        ("<|im_end|>{{ m.role }}: {{ m.content }}", "4<|im_end|>", "5", "user: 5"),
    ],
)
def test_ends_of_other_kinds(small_dir, tmp_path, template, turn, answer, follows):
    tokenizer_of = ChatTokenizer(small_dir, "{% for m in messages %}" + template + "{% endfor %}")
    ids = tokenizer_of.turn_boundary_ids([user(answer)], end=tokenizer_of.encode(turn)[-1])
    assert tokenizer_of.decode_all(ids) == follows


# As SmolLM3's: a word of the system prompt decides how every turn begins.
BY_SYSTEM = """{% set off = messages[0].role == 'system' and '/no_think' in messages[0].content %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and off %}<think>

</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if off %}<think>

</think>
{% endif %}{% endif %}"""


# The marks stand around the whole turn, its header included.
TAGGED = """{% set off = messages[0].role == 'system' and '/no_think' in messages[0].content %}{% for m in messages -%}
{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant
{% if off %}<think>

</think>
{% endif %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if off %}<think>

</think>
{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    "first", [[], [system("Be brief.")], [system("/no_think")], [system("\ue0f1\ue0f2 /no_think"), system("x")]]
)
@pytest.mark.parametrize("template", [BY_SYSTEM, TAGGED])
def test_system_prompt_decides_how_later_turns_begin(small_dir, first, template):
    tokenizer = ChatTokenizer(small_dir, template)
    messages = [*first, user("2+2?"), policy("4"), user("3+3?"), policy("6"), user("So?")]
    ids, start, episode = appended(tokenizer, messages)
    assert ids == tokenizer.prompt_ids(messages)
    assert appended(tokenizer, messages, history="template")[0] == ids
    learned, mask = tokenizer.conversation_ids(messages, add_generation_prompt=True)
    assert (
        learned == ids
        and np.flatnonzero(mask).tolist()
        == (start + episode.to_sample("completed").completion.sampled_indices).tolist()
    )


def test_tool_message_without_an_id_is_rendered(small_dir):
    """Mistral's template refuses one without an id of nine letters or digits; one with an id keeps it."""
    refuses = "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ m.tool_call_id }}"
    tools = "{% if m.role == 'tool' %}" + refuses + "{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + tools + "<|im_end|>{% endfor %}"
    tokenizer = ChatTokenizer(small_dir, template)
    assert "000000000" in tokenizer.decode_all(tokenizer.turn_boundary_ids([tool("4")], end=0))
    named = tool("4") | {"tool_call_id": "abcdefgh1"}
    assert "abcdefgh1" in tokenizer.decode_all(tokenizer.prompt_ids([user("x"), policy("add"), named]))


def test_a_template_that_forgets_turns_is_refused(small_dir):
    forgets = "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UsageError, match="does not write an assistant's turn before further messages"):
        ChatTokenizer(small_dir, forgets).turn_boundary_ids([user("5")], end=0)
    with pytest.raises(
        UsageError, match="does not write the end of each of the assistant's 1 turns before further messages"
    ):
        ChatTokenizer(small_dir, forgets).context_ids([user("x")], [policy("4"), user("5")], [[7]])
