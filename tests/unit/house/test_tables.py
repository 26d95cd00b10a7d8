"""Tables of tests (tests/helpers/tables.py): no row hides another, and each has fixtures of its own."""

import os

import pytest

from helpers.tables import every_row


def test_all_rows_that_fail_are_named_and_none_hides_another():
    tried = []

    @every_row("a, b", [(1, 1), (1, 2), (3, 3), (4, 5)], ids=["one", "two", "three", "four"])
    def equal(a, b):
        tried.append(a)
        assert a == b, "unlike"

    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)^2 of 4 rows:\nrow 1, two:.*unlike.*row 3, four:.*unlike"
    ) as error:
        equal()
    assert tried == [1, 1, 3, 4] and "three" not in str(error.value)


def test_an_error_that_did_not_come_is_a_row_that_fails():
    @every_row("value", [0, 1])
    def divided(value):
        with pytest.raises(ZeroDivisionError):
            _ = 1 / value

    with pytest.raises(pytest.fail.Exception, match=r"(?s)^1 of 2 rows:\nrow 1, \(1,\):.*DID NOT RAISE"):
        divided()


def test_a_table_of_a_table():
    @every_row("a", [1, 2])
    @every_row("b", [1, 2])
    def equal(a, b):
        assert a == b

    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)row 0, \(1,\):.*row 1, \(2,\):.*row 1, \(2,\):.*row 0, \(1,\):"
    ):
        equal()


@every_row("word", ["first", "second"])
def test_what_a_row_changes_no_other_one_sees(word, tmp_path, monkeypatch, capsys, caplog):
    assert list(tmp_path.iterdir()) == [] and "TABLES_WORD" not in os.environ
    assert capsys.readouterr().out == "" and caplog.text == ""
    (tmp_path / word).touch()
    monkeypatch.setenv("TABLES_WORD", word)
    print(word)
