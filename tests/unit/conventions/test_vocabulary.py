"""The words of README, docs, messages and comments, and the length of test names: the vocabulary of CONTRIBUTING.md."""

import pytest
import vocabulary


@pytest.fixture(scope="module")
def uses():
    return vocabulary.found(vocabulary.ROOT)


@pytest.mark.parametrize("phrase", vocabulary.BANNED)
def test_banned_phrase_is_not_used(phrase, uses):
    assert uses[phrase] == [], f"write: {vocabulary.BANNED[phrase]}"


def test_vocabulary_searches_pages_strings_and_comments(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("The run goes on after a crash.\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.py").write_text('behind = 1  # the engine is lost\nprint("no such key", behind)\n')
    lines = [use for phrase in vocabulary.found(tmp_path).values() for use in phrase]
    assert len(lines) == 3
    # Identifiers are reviewed, not searched.
    assert not any(line.startswith("recipes/r.py:1: behind") for line in lines)


def test_test_names_are_at_most_eight_words():
    assert vocabulary.long_test_names(vocabulary.ROOT) == []
