from radixtrain.report.contents import DataReport, Setting, TreeNode
from radixtrain.report.figures import MIN_TEXT, TEXT_BUDGET, icicle, panels, top_of


def node(text: str, tokens: int, sequences: int, *children: TreeNode) -> TreeNode:
    return TreeNode(text=text, num_tokens=tokens, num_sequences=sequences, children=children)


def setting(batch_size: int, max_tokens: int, r: float, grouped: bool = False, **more: float | None) -> Setting:
    return Setting(
        batch_size=batch_size,
        max_tokens=max_tokens,
        group_by_prefix=grouped,
        r=r,
        best_r=2 * r,
        **more,  # type: ignore[arg-type]
    )


def report(current: Setting, best: Setting, *settings: Setting) -> DataReport:
    numbers = dict.fromkeys(
        ["num_rows", "num_samples", "num_tokens", "num_unique_tokens", "num_labels", "num_prompts"], 1
    )
    return DataReport(
        **{"title": "t", "model": "m", "length_quantiles": {"max": 1}, "max_length": None, "num_over_length": 0},
        **{"longest": 1, "sources": {}, "tree": node("", 0, 1), "command": "", "breaks": ()},
        **{"environment": {}, "current": current, "best": best, "settings": settings, **numbers},
    )


class TestIcicle:
    def test_entries_in_pre_order_with_the_hidden_last(self) -> None:
        hidden = {"num_hidden_children": 3, "num_hidden_sequences": 4, "num_hidden_tokens": 50}
        shared = TreeNode(
            text="a", num_tokens=9, num_sequences=7, children=(node("b", 2, 3, node("c", 1, 2)),), **hidden
        )
        assert icicle(node("", 0, 8, shared, node("d", 5, 1))) == {
            "parents": [-1, 0, 1, 2, 1, 0],
            "texts": ["", "a", "b", "c", "", "d"],
            "tokens": [0, 9, 2, 1, 50, 5],
            "sequences": [8, 7, 3, 2, 4, 1],
            "branches": [0, 0, 0, 0, 3, 0],
        }

    def test_an_empty_root_with_one_child_is_skipped(self) -> None:
        assert top_of(node("", 0, 2, node("a", 1, 2))).text == "a"
        assert icicle(node("", 0, 2, node("a", 1, 2)))["parents"] == [-1]

    def test_an_empty_root_with_hidden_children_is_kept(self) -> None:
        root = TreeNode(text="", num_tokens=0, num_sequences=3, children=(node("a", 1, 2),), num_hidden_children=1)
        assert top_of(root) is root

    def test_a_chain_of_thousands(self) -> None:
        chain = node("end", 1, 1)
        for _ in range(5000):
            chain = node("turn", 1, 1, chain)
        assert icicle(chain)["parents"] == list(range(-1, 5000))

    def test_texts_are_bounded_together(self) -> None:
        many = node("", 0, 3000, *(node("x" * 500, 1, 1) for _ in range(3000)))
        texts = icicle(many)["texts"]
        assert max(map(len, texts)) == TEXT_BUDGET // 3001 > MIN_TEXT
        assert texts[1].count("…") == 1


class TestPanels:
    def test_over_each_axis_at_the_users_other_value(self) -> None:
        mine = setting(32, 4096, 3.0)
        others = [
            setting(8, 4096, 1.0),
            setting(8, 4096, 1.5, grouped=True),
            setting(32, 1024, 2.0),
            setting(8, 1024, 9.0),
        ]
        by_batch, by_tokens = panels(report(mine, others[2], *others))
        assert (by_batch["section"], by_batch["axis"], by_batch["title"]) == ("r", "batch_size", "max_tokens 4,096")
        assert by_batch["lines"] == [
            {"name": "shuffled", "grouped": False, "limit": False, "x": [8, 32], "y": [1.0, 3.0]},
            {"name": "best r, shuffled", "grouped": False, "limit": True, "x": [8, 32], "y": [2.0, 6.0]},
            {"name": "group_by_prefix", "grouped": True, "limit": False, "x": [8], "y": [1.5]},
            {"name": "best r, group_by_prefix", "grouped": True, "limit": True, "x": [8], "y": [3.0]},
        ]
        assert by_batch["marks"] == [{"name": "yours", "x": 32, "y": 3.0}]
        assert by_tokens["lines"][0] == {
            "name": "shuffled",
            "grouped": False,
            "limit": False,
            "x": [1024, 4096],
            "y": [2.0, 3.0],
        }
        assert [mark["name"] for mark in by_tokens["marks"]] == ["yours", "best"]

    def test_of_one_setting_there_is_none(self) -> None:
        mine = setting(32, 4096, 3.0)
        assert panels(report(mine, mine, mine)) == []

    def test_what_was_not_predicted_has_none(self) -> None:
        mine, other = setting(8, 64, 1.0, speedup=2.0, memory_bytes=3 * 2**30), setting(16, 64, 2.0, speedup=None)
        last = setting(32, 64, 3.0, speedup=5.0, memory_bytes=2**30)
        found = {panel["section"]: panel for panel in panels(report(mine, mine, other, last))}
        assert found["memory"]["y"] == "peak memory, GiB"
        assert found["r"]["lines"][0]["x"] == [8, 16, 32]
        assert found["speedup"]["lines"][0]["y"] == [2.0, 5.0]
        assert found["memory"]["lines"] == [
            {"name": "shuffled", "grouped": False, "limit": False, "x": [8, 32], "y": [3.0, 1.0]}
        ]

    def test_little_memory_is_in_mebibytes(self) -> None:
        mine, other = setting(8, 64, 1.0, memory_bytes=3 * 2**20), setting(16, 64, 2.0, memory_bytes=2**30 - 2**20)
        (memory,) = [panel for panel in panels(report(mine, mine, other)) if panel["section"] == "memory"]
        assert (memory["y"], memory["unit"], memory["lines"][0]["y"]) == ("peak memory, MiB", " MiB", [3.0, 1023.0])
