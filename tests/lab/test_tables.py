"""Terminal tables: aligned, never wrapped, and free of rich's markup."""

from labkit.lab.tables import columns_of, table


def test_columns_are_aligned_and_brackets_are_text():
    text = table(("arm", "ratio [95 %]"), [("int4:smile:", "1.20 [1.10, 1.30]"), ("x" * 90, None)])
    head, first, second = text.splitlines()
    assert head.endswith("ratio [95 %]") and first.startswith("int4:smile:")
    assert first.endswith("1.20 [1.10, 1.30]") and second == "x" * 90 + "  " + "-".rjust(17)
    assert len(head) == len(first) == len(second)


def test_a_row_shows_the_keys_of_its_entry_and_a_dash_for_what_is_missing():
    columns = {"tok/s": "{tok_s:.1f}", "interval": "{low:.2f}-{high:.2f}", "share": "{share:.0%}"}
    text = columns_of(
        {"a": {"tok_s": 1.25, "low": 1, "high": 2, "share": None}, "b": {}}, columns, "arm"
    )
    assert [line.split() for line in text.splitlines()] == [
        ["arm", "tok/s", "interval", "share"],
        ["a", "1.2", "1.00-2.00", "-"],
        ["b", "-", "---", "-"],
    ]
