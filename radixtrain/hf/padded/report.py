"""What `share_prefixes` did, counted: `sharing_report`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SharingReport"]


@dataclass
class SharingReport:
    """Totals over all calls of a model since `share_prefixes`.

    num_shared: calls that ran on unique tokens.
    not_shared: calls that ran as if nothing had been installed, counted by reason.
    num_places: sum of B x L over the shared calls, which an ordinary model computes.
    num_tokens: sum of T over them, without padding.
    num_unique_tokens: sum of U over them, which were computed.
    num_head_places, num_head_rows: rows that the head was asked for, and that it computed, in its calls that shared.
    plan_seconds: spent on reading ids and building plans, also for calls that were not shared then.
    """

    num_shared: int = 0
    not_shared: Counter[str] = field(default_factory=Counter)
    num_places: int = 0
    num_tokens: int = 0
    num_unique_tokens: int = 0
    num_head_places: int = 0
    num_head_rows: int = 0
    plan_seconds: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> SharingReport:
        """The copy of a model counts its own calls."""
        return SharingReport()

    @property
    def compression_ratio(self) -> float:
        """r = T / U; 1.0 if nothing was shared."""
        return self.num_tokens / self.num_unique_tokens if self.num_unique_tokens else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.num_shared} calls shared: {self.num_places:,} places, {self.num_tokens:,} tokens, "
            f"{self.num_unique_tokens:,} unique, r = {self.compression_ratio:.2f}; "
            f"plans took {self.plan_seconds:.2f} s"
        ]
        if self.num_head_places:
            lines.append(f"the head computed {self.num_head_rows:,} rows for {self.num_head_places:,} places")
        if not self.num_shared and not self.not_shared:
            lines.append("the backbone was never called: hooks do not run if something calls its forward method")
        lines += [f"{count} calls not shared: {reason}" for reason, count in self.not_shared.most_common()]
        return "\n".join(lines)
