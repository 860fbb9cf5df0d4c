"""The messages or calls of a run, as stores of rollouts keep what each adds -> a row for each path of the tree.

A `Store` says where its tokens are, and the rest is the same for all. An item names its parent; or it is a call
with its whole prompt, and continues the longest earlier call whose tokens the prompt begins with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from radixtrain.data.sample import check_unweighted
from radixtrain.errors import DataError

Fields = dict[str, Any]
MEDIA = ("multi_modal_data", "multimodal_inputs", "multimodal_train_inputs")
UNTRAINED = ("delivery_uncertain", "remove_sample")
"""How SkyRL-capture and miles mark an item whose tokens are context only."""
WHOLE = ("completed", "truncated")
"""The status of a sample that did not fail, in miles."""
UNRECORDED = "the run was not recorded for training; use its messages"


class Store(NamedTuple):
    """Where an item of a store keeps what it adds. A dot goes into an object or a list, and `*` over a list.

    tokens: all tokens; or, with `completion`, those before the sampled ones.
    mask: true for a sampled token. completion: the sampled tokens.
    logprobs, advantages: numbers of all tokens, or of the sampled ones; an advantage may be one number for all.
    tail: how many tokens at the end the mask and the numbers are for. Without a mask all of these are sampled.
    parent: of the item that this one continues, its `id`, or without `id` its place in the list.
    """

    tokens: str
    mask: str = ""
    completion: str = ""
    logprobs: str = "logprobs"
    advantages: str = ""
    tail: str = ""
    parent: str = ""
    id: str = ""


class Piece(NamedTuple):
    """What an item adds. The lists have an entry for each token; None if the store has no logprobs or advantages."""

    token_ids: list[Any]
    mask: list[int]
    logprobs: list[Any] | None
    advantages: list[Any] | None
    what: str


def row_of(item: Fields, store: Store, where: str, what: str = "") -> Fields:
    """Return the row of an item that is a whole sequence: `input_ids`, `mask`, perhaps `old_logprobs` and `advantages`.

    what: which item of the row it is, for errors.

    Raises DataError for lists of different lengths, images, a sample that failed, and a call without its prompt.
    """
    return _joined([_piece(item, store, where, what)], where)


def rows_of_tree(items: list[Fields], store: Store, name: str, where: str) -> list[Fields]:
    """Return the row of each path from root to leaf; those without a sampled token are dropped if others have some.

    name: of the list, for errors.

    Raises DataError as `row_of`, and if no item has tokens or a parent is not an earlier item.
    """
    if not any(value_at(item, store.tokens) for item in items):
        raise DataError(where, f"{name}: none has {store.tokens}: {UNRECORDED}")
    noun = name[:-1]
    pieces = [_piece(item, store, where, f"{name}: {noun} {number}: ") for number, item in enumerate(items)]
    if store.parent:
        parents = _parents(items, store, noun, pieces, where)
    else:
        pieces, parents = _continued(pieces)
    paths = [[pieces[number] for number in _path(parents, leaf)] for leaf in _leaves(items, parents)]
    sampled = [path for path in paths if any(any(piece.mask) for piece in path)]
    return [_joined(path, where) for path in sampled or paths]


def value_at(item: object, place: str) -> Any:
    """Return what is at a place of an item, see `Store`; None if nothing is."""
    key, _, rest = place.partition(".")
    if key == "*":
        return [value_at(each, rest) for each in item] if isinstance(item, list) else None
    if isinstance(item, list):
        value = item[int(key)] if key.isdigit() and int(key) < len(item) else None
    else:
        value = item.get(key) if isinstance(item, dict) else None
    return value_at(value, rest) if rest else value


def list_at(item: Fields, place: str, where: str, what: str = "") -> list[Any]:
    """Return the list at a place, see `Store`. Raises DataError if there is none."""
    values = value_at(item, place)
    if not isinstance(values, list):
        found = "nothing" if values is None else repr(values)[:40]
        raise DataError(where, f"{what}{place}: expected a list, found {found}")
    return values


def _piece(item: Fields, store: Store, where: str, what: str) -> Piece:
    _check_item(item, store, where, what)
    is_message = bool(store.parent and not store.completion)
    if is_message and value_at(item, store.tokens) is None:
        return Piece([], [], None, None, what)  # that no call has read
    if not is_message and not value_at(item, store.tokens) and item.get(store.parent) is None:
        raise DataError(where, f"{what}{store.tokens}: expected tokens, found none: {UNRECORDED}")
    tokens = list_at(item, store.tokens, where, what)
    if store.completion:
        completion = list_at(item, store.completion, where, what)
        tokens, mask = tokens + completion, [0] * len(tokens) + [1] * len(completion)
    else:
        mask = _mask(item, store, len(tokens), where, what)
    logprobs, advantages = (
        _numbers(item, name, store, mask, where, what) for name in (store.logprobs, store.advantages)
    )
    if any(item.get(name) for name in UNTRAINED):
        mask = [0] * len(mask)
    return Piece(tokens, mask, logprobs, advantages, what)


def _check_item(item: Fields, store: Store, where: str, what: str) -> None:
    check_unweighted({name: value for name, value in item.items() if name != store.advantages}, where)
    check_text(item, where, what)
    if store.tail and item.get("status", WHOLE[0]) not in WHOLE:
        reason = f"expected {' or '.join(WHOLE)}, found {item['status']}"
        raise DataError(where, f"{what}status: {reason}; leave it out, or set on_bad_row: skip")


def check_text(item: Fields, where: str, what: str) -> None:
    """Raise DataError if a message of an item has a part that is not text, or the item has other media."""
    kinds = [str(part.get("type", "text")) for part in _parts(item)]
    if any(kind != "text" for kind in kinds) or any(item.get(name) for name in MEDIA):
        raise DataError(where, f"{what}only text is read, found {', '.join(kinds) or 'images'}")


def _parts(item: Fields) -> Iterator[Fields]:
    """Yield the parts of all messages of an item whose content is a list."""
    remaining: list[Any] = [item]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            content = value.get("content")
            yield from (part for part in (content if isinstance(content, list) else ()) if isinstance(part, dict))
            remaining.extend(value.values())
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            remaining.extend(value)


def _mask(item: Fields, store: Store, length: int, where: str, what: str) -> list[int]:
    count = value_at(item, store.tail) if store.tail else length
    if type(count) is not int or not 0 <= count <= length:
        raise DataError(where, f"{what}{store.tail}: expected 0 to {length}, the number of tokens, found {count!r}")
    whole = bool(store.tail) and value_at(item, store.mask) is None
    mask = [1] * count if whole else list_at(item, store.mask, where, what)
    if len(mask) != count:
        many = store.tail or store.tokens
        raise DataError(where, f"{what}{store.mask}: expected {count} values, as many as {many}, found {len(mask)}")
    for place, value in enumerate(mask):
        if value not in (0, 1):
            raise DataError(where, f"{what}{store.mask}: expected true or false, found {value!r} at position {place}")
    return [0] * (length - count) + [int(value) for value in mask]


def _numbers(item: Fields, place: str, store: Store, mask: list[int], where: str, what: str) -> list[Any] | None:
    """Return a number for each token, 0.0 for those that were not sampled; None if there are none."""
    values = value_at(item, place) if place else None
    if values is None or (values == [] and any(mask)):
        return None
    if isinstance(values, int | float) and place == store.advantages:
        return [values if sampled else 0.0 for sampled in mask]
    values = list_at(item, place, where, what)
    count = value_at(item, store.tail) if store.tail else len(mask)
    if len(values) == count:
        return [0.0] * (len(mask) - count) + values
    if len(values) != sum(mask):
        expected = f"{sum(mask)} values, as many as sampled tokens, or {count}, as many as {store.tail or store.tokens}"
        raise DataError(where, f"{what}{place}: expected {expected}; found {len(values)}")
    remaining = iter(values)
    return [next(remaining) if sampled else 0.0 for sampled in mask]


def _parents(items: list[Fields], store: Store, noun: str, pieces: list[Piece], where: str) -> list[int | None]:
    places: dict[Any, int] = {}
    parents = []
    for number, item in enumerate(items):
        parent, key, what = item.get(store.parent), item.get(store.id) if store.id else number, pieces[number].what
        if parent is not None and (type(parent) is not type(key) or parent not in places):
            raise DataError(where, f"{what}{store.parent}: expected an earlier {noun} or null, found {parent!r}")
        if type(key) not in (int, str) or key in places:
            raise DataError(where, f"{what}{store.id}: expected a name that no earlier {noun} has, found {key!r}")
        parents.append(None if parent is None else places[parent])
        places[key] = number
    return parents


def _continued(calls: list[Piece]) -> tuple[list[Piece], list[int | None]]:
    """Return what each call adds to the longest earlier one with whose tokens its prompt begins, and which that is."""
    pieces: list[Piece] = []
    parents: list[int | None] = []
    for number, call in enumerate(calls):
        earlier = sorted(range(number), key=lambda index: len(calls[index].token_ids), reverse=True)
        parent = next((index for index in earlier if _begins_with(call, calls[index].token_ids)), None)
        start = 0 if parent is None else len(calls[parent].token_ids)
        logprobs, advantages = (None if column is None else column[start:] for column in call[2:4])
        pieces.append(Piece(call.token_ids[start:], call.mask[start:], logprobs, advantages, call.what))
        parents.append(parent)
    return pieces, parents


def _begins_with(call: Piece, tokens: list[Any]) -> bool:
    """Return whether the prompt of a call begins with the tokens. Compares the last one first, as it mostly differs."""
    size, prompt = len(tokens), call.mask.count(0)
    return size <= prompt and call.token_ids[size - 1] == tokens[-1] and call.token_ids[:size] == tokens


def _leaves(items: list[Fields], parents: list[int | None]) -> list[int]:
    """List the items that none continues, without summaries from which verifiers' agent did not go on."""
    links = [[link for link in item.get("semantic_parents") or [] if isinstance(link, dict)] for item in items]
    accepted = {link.get("node") for each in links for link in each if link.get("type") == "compaction"}
    lost = {n for n, each in enumerate(links) for link in each if link.get("type") == "compaction_attempt"} - accepted
    others = {*parents, *lost}
    return [number for number in range(len(items)) if number not in others]


def _path(parents: list[int | None], leaf: int) -> list[int]:
    """Return the places from the root to a leaf."""
    path = [leaf]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]


def _joined(path: list[Piece], where: str) -> Fields:
    """Join the columns of the pieces."""
    row: Fields = {
        "input_ids": [token for piece in path for token in piece.token_ids],
        "mask": [sampled for piece in path for sampled in piece.mask],
    }
    trained = [piece for piece in path if any(piece.mask)]
    for name, column in {"old_logprobs": "logprobs", "advantages": "advantages"}.items():
        lacking = [piece for piece in trained if getattr(piece, column) is None]
        if len(lacking) == len(trained):
            continue
        if lacking and name == "old_logprobs":
            raise DataError(where, f"{lacking[0].what}logprobs: expected some, as others of its sequence have them")
        row[name] = [x for piece in path for x in getattr(piece, column) or [0.0] * len(piece.mask)]
    return row
