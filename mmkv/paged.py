"""Paged slots: for engines that keep a conversation's rows in pages, in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv.geometry import TokenRuns
from mmkv.layout import Layout
from mmkv.memory import SlotMemory
from mmkv.sizes import as_count

__all__ = ["PagedSlot"]


class PagedSlot:
    """A slot whose rows lie in pages; holds references, copies nothing.

    Parameters
    ----------
    layout : Layout
        What the arrays are laid out as. For opaque pages, one with `opaque_page_tokens`.
    arrays : sequence of mapping of str to array
        `arrays[layer][plane]`, each of shape `(pages, page_tokens, *plane.shape)`, C-contiguous; for opaque pages any
        shape whose first axis is the pages and whose bytes are as many.
    page_table : array_like of int, shape (slot_pages,)
        The pages that hold the conversation, in its order; no page twice. Copied.
    page_tokens : int
        Tokens of a page.
    opaque : bool
        Whether only the engine knows the order of a page's bytes. Then whole pages move, and a prefix ends at a page.
    state : sequence of mapping of str to array, optional
        As for `Slot`.

    Raises
    ------
    ValueError, TypeError
        As for `Slot`; or the page table names a page that is not there, or one twice.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Sequence[Mapping[str, Any]],
        page_table: Any,
        page_tokens: int,
        *,
        opaque: bool = False,
        state: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.page_tokens = as_count(page_tokens, "page_tokens", least=1)
        if layout.opaque_page_tokens != (self.page_tokens if opaque else None):
            kind = "opaque" if opaque else "not opaque"
            raise ValueError(
                f"the layout's opaque_page_tokens is {layout.opaque_page_tokens}, but the slot's pages of "
                f"{self.page_tokens} tokens are {kind}: bytes in one order are of no use in the other"
            )
        shape = None if opaque else (self.page_tokens,)
        self.memory = SlotMemory(layout, arrays, state, page_shape=shape, page_tokens=self.page_tokens)
        self._table = _page_table(page_table, self.memory.length)

    def __repr__(self) -> str:
        return f"PagedSlot({self.memory!r}, pages={len(self._table)}, page_tokens={self.page_tokens})"

    @property
    def layout(self) -> Layout:
        """What the arrays are laid out as."""
        return self.memory.layout

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the pages of the table hold; `None` where the layout has no planes."""
        return None if self.memory.length is None else len(self._table) * self.page_tokens

    def place(self, runs: TokenRuns) -> tuple[TokenRuns, npt.NDArray[np.int64]]:
        """The runs, split where pages are not neighbours, and the row of the arrays where each starts."""
        page_tokens = self.page_tokens
        first = runs.token // page_tokens
        touched = (runs.token + runs.tokens - 1) // page_tokens - first + 1
        # One piece for each page that a run touches.
        run = np.repeat(np.arange(len(touched)), touched)
        page = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(touched) - touched, touched)
        start = np.maximum(page * page_tokens, runs.token[run])
        stop = np.minimum((page + 1) * page_tokens, (runs.token + runs.tokens)[run])
        row = self._table[page] * page_tokens + start % page_tokens
        joined = np.zeros(len(run), dtype=bool)
        joined[1:] = (run[1:] == run[:-1]) & (row[1:] == row[:-1] + (stop - start)[:-1])
        heads = np.flatnonzero(~joined)
        tokens = np.add.reduceat(stop - start, heads) if len(heads) else stop - start
        pieces = TokenRuns(
            runs.segment[run][heads], (runs.row[run] + start - runs.token[run])[heads], start[heads], tokens
        )
        return pieces, row[heads]


def _page_table(page_table: Any, pages: int | None) -> npt.NDArray[np.int64]:
    table = np.asarray(page_table)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise TypeError(
            f"page_table must be one-dimensional integers in host memory, not {table.dtype} of the shape {table.shape}"
        )
    table = table.astype(np.int64)
    if table.size and pages is not None and (int(table.min()) < 0 or int(table.max()) >= pages):
        bad = int(table.min()) if int(table.min()) < 0 else int(table.max())
        raise ValueError(f"page_table names page {bad}, but the arrays hold pages 0 to {pages - 1}")
    unique, counts = np.unique(table, return_counts=True)
    if len(unique) != len(table):
        raise ValueError(f"page_table names page {int(unique[counts > 1][0])} twice")
    return table
