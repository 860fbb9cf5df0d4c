"""Features, read and checked once, as NumPy arrays: what every collator and the oracle start from.

A feature is a mapping as Hugging Face's data sets yield it: `input_ids`, and labels or a mask for the loss. It may have
floats, one for each token, aligned with the labels and not shifted: entry t belongs to token t, which is predicted from
the one before. They become float32 here, as in the tensor that an ordinary collator would make.

A collator drops what it does not read. If a model read such an entry, the gradient would change, so an entry that could
be an input of a model is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, cumulative

FloatArray: TypeAlias = npt.NDArray[np.float32]
IGNORE_INDEX = -100
FLOATS = {"loss_weights": ("loss_weights", "weights"), "old_logprobs": ("old_logprobs",), "advantages": ("advantages",)}
"""The floats that a feature may have, and the names of its entry."""
FLOAT_ENTRIES = frozenset(entry for entries in FLOATS.values() for entry in entries)
ONE_FOR_ALL = frozenset({"advantages"})  # may be a single number for all tokens
LOSS_MASKS = ("completion_mask", "assistant_masks", "mask")
READ = frozenset({"input_ids", "labels", *LOSS_MASKS, "attention_mask", "position_ids", "seq_lengths", *FLOAT_ENTRIES})
"""The entries of a feature that a collator reads."""
HARMLESS = frozenset(
    (
        *("length", "num_tokens", "num_truncated_tokens", "overflowing_tokens"),  # sizes, and what a tokenizer cut off
        *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),  # a tokenizer's notes on its tokens
        *("id", "idx", "index", "row_id", "__index_level_0__"),  # which example it is; the last name is from pandas
    )
)
"""Bookkeeping numbers: accepted but not read, since no causal model of transformers takes them as input."""
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})  # paths and undecoded bytes too
_METADATA = (str, bytes, type(None), dict, date, time, timedelta)
_UNREAD = {
    r"^token_type_ids$": "is not read by radixtrain, and a model that reads it, such as GPT-2, would get another "
    "gradient; tokenize with tokenizer(..., return_token_type_ids=False), or remove the column",
    r"pixel|image|^mm_": "is not read: rows with images are what the model's processor returns, for a "
    "RadixCollator(images=image_inputs_of(model)); remove the column if the text is complete without it",
    r"video|audio|^input_features": "is not read by radixtrain: it trains on text and images only; remove the column "
    "if the text is complete without it",
    r"^inputs_embeds$": "is not read by radixtrain, which shares tokens by their ids; remove the column",
    r"": "is not read by radixtrain, and a model or loss that reads it would get another gradient; remove the column",
}
KNOWN = READ | HARMLESS


class FeatureArrays(NamedTuple):
    """One sequence, without its padding.

    input_ids: (L,), int64.
    labels: (L,), int64. unshifted; a token with -100 bears no loss.
    position_ids: (L,), int64, or None if they count from 0.
    num_left_padding: tokens that the attention mask hid before the first of these.
    loss_weights, old_logprobs, advantages: (L,), float32, aligned with the labels, 0 where there is none; None if the
        feature has no such entry.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray | None
    num_left_padding: int
    loss_weights: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    advantages: FloatArray | None = None

    @property
    def num_labels(self) -> int:
        """Tokens that bear loss; the first one is never predicted."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    @property
    def is_counted_from_padding(self) -> bool:
        """Whether Hugging Face would count the positions from the left padding, as it does if none are given."""
        return self.num_left_padding > 0 and self.position_ids is None


def all_feature_arrays(features: Sequence[Mapping[str, Any]], loss_on_all: bool = False) -> list[FeatureArrays]:
    """Read features, each of which is one sequence.

    loss_on_all: a feature that has neither labels nor a loss mask bears loss on every token; otherwise it is refused.

    Raises ValueError for an empty list of features. Raises ValueError that names the feature and its entry for: no
    labels and no loss mask; an entry that is not a flat list of integers (of finite numbers, for loss weights,
    log-probabilities and advantages), or not as long as `input_ids`; a negative integer; a mask value other than 0 and
    1; an empty sequence; several packed ones; an attention mask with a hole; labels on padding; log-probabilities or
    advantages in only some of the features that bear loss; and an entry that a collator does not read, unless it cannot
    be an input of a model.
    """
    if not features:
        raise ValueError("a collator needs at least one feature, got an empty list")
    arrays = [_feature_arrays(feature, index, loss_on_all) for index, feature in enumerate(features)]
    for name in ("input_ids", "labels", "position_ids"):
        _check_not_negative(name, arrays)
    for name in ("old_logprobs", "advantages"):
        _check_in_all(name, arrays)
    return arrays


class PackedFeatures(NamedTuple):
    """Features back to back.

    input_ids, labels: (T,), int64.
    cu_seqlens: (B+1,), int64. where each begins, and the end.
    position_ids: (T,), int64, from 0 in features that have none; None if no feature has any.
    floats: (T,), float32, of each kind that some feature has; 1 in features that have none.
    """

    input_ids: IntArray
    labels: IntArray
    cu_seqlens: IntArray
    position_ids: IntArray | None
    floats: dict[str, FloatArray]


def packed(arrays: Sequence[FeatureArrays]) -> PackedFeatures:
    """One feature or more, back to back."""
    lengths = [len(feature.input_ids) for feature in arrays]

    def column(name: str, default: Callable[[int], np.ndarray] = np.arange) -> Any:
        columns = [getattr(feature, name) for feature in arrays]
        if all(values is None for values in columns):
            return None
        return np.concatenate([default(n) if x is None else x for x, n in zip(columns, lengths, strict=True)])

    floats = {name: column(name, partial(np.ones, dtype=np.float32)) for name in FLOATS}
    return PackedFeatures(
        column("input_ids"),
        column("labels"),
        cumulative(np.array(lengths)),
        column("position_ids"),
        {name: values for name, values in floats.items() if values is not None},
    )


def _feature_arrays(feature: Mapping[str, Any], index: int, loss_on_all: bool) -> FeatureArrays:
    """One feature's arrays, checked except for negative values."""
    try:
        is_known = feature.keys() <= KNOWN
    except AttributeError:
        kind = type(feature).__name__
        raise ValueError(f"feature {index} must be a mapping such as a dict, got {kind}") from None
    if feature.get("input_ids") is None:
        raise ValueError(f"feature {index} has no input_ids, only {sorted(map(str, feature))}")
    if not is_known:
        _check_unread({name: value for name, value in feature.items() if name not in READ}, index)
    ids = _integers(feature, "input_ids", index)
    if not len(ids):
        raise ValueError(f"feature {index}: input_ids is empty")
    positions = _column(feature, "position_ids", ids, index) if feature.get("position_ids") is not None else None
    labels = _labels(feature, ids, index, loss_on_all)
    floats = {} if feature.keys().isdisjoint(FLOAT_ENTRIES) else _token_floats(feature, labels, index)
    sequence = FeatureArrays(ids, labels, positions, 0, **floats)
    if feature.get("attention_mask") is not None:
        sequence = _without_padding(sequence, feature, index)
    _check_one_sequence(feature, sequence.position_ids, index)
    return sequence


def _labels(feature: Mapping[str, Any], ids: IntArray, index: int, loss_on_all: bool) -> IntArray:
    if feature.get("labels") is not None:
        return _column(feature, "labels", ids, index)
    names = [name for name in LOSS_MASKS if feature.get(name) is not None]
    if not names and not loss_on_all:
        raise ValueError(
            f"feature {index} has neither labels nor {', '.join(LOSS_MASKS[:-1])} or {LOSS_MASKS[-1]}, so nothing says "
            f"where the loss is. "
            f"Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
            f"RadixCollator(loss_on_all=True) trains every token"
        )
    labels = ids
    for name in names:
        labels = np.where(_mask(feature, name, ids, index), labels, IGNORE_INDEX)
    return labels


def _without_padding(sequence: FeatureArrays, feature: Mapping[str, Any], index: int) -> FeatureArrays:
    """Without the tokens on the left and on the right that the attention mask hides."""
    mask = _mask(feature, "attention_mask", sequence.input_ids, index)
    num_seen = np.count_nonzero(mask)
    if num_seen == len(mask):
        return sequence
    if not num_seen:
        raise ValueError(f"feature {index}: attention_mask hides every token, so the sequence is empty")
    start, end = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
    if num_seen != end - start:
        raise ValueError(
            f"feature {index}: attention_mask has a hole at token {start + int(mask[start:end].argmin())}: it would be "
            f"dropped, and the tokens after it would move up; only padding on the left or on the right may be hidden. "
            f"Remove the hidden token from every column; or, if only the loss should skip it, set attention_mask to 1 "
            f"and labels to -100 there"
        )
    if feature.get("labels") is not None:
        _check_no_loss_on_padding(sequence.labels, mask, start, end, index)
    if np.count_nonzero(sequence.input_ids < 0):
        raise _negative("input_ids", sequence.input_ids, int(sequence.input_ids.argmin()), 0, index)
    columns = {name: column for name, column in sequence._asdict().items() if isinstance(column, np.ndarray)}
    kept = {name: column[start:end] for name, column in columns.items()}
    return sequence._replace(**kept, num_left_padding=start)


def _check_no_loss_on_padding(labels: IntArray, mask: npt.NDArray[np.bool_], start: int, end: int, index: int) -> None:
    """An ordinary model takes its loss from the labels, whatever the mask says."""
    bears_loss = labels != IGNORE_INDEX
    bears_loss[0] = False  # it is never predicted
    bears_loss[start + 1 : end] = False  # predicted from a token that is not hidden
    if np.count_nonzero(bears_loss):
        place = int(bears_loss.argmax())
        raise ValueError(
            f"feature {index}: labels[{place}] = {labels[place]} {'is predicted from' if mask[place] else 'lies on'} a "
            f"token that attention_mask hides, so an ordinary model would train on padding; set it to -100"
        )


def _check_one_sequence(feature: Mapping[str, Any], positions: IntArray | None, index: int) -> None:
    """Refuse a row into which another packer put several sequences: each would attend to those before it."""
    lengths = None if feature.get("seq_lengths") is None else _integers(feature, "seq_lengths", index)
    is_packed = lengths is not None and len(lengths) > 1
    if is_packed or (positions is not None and (positions[1:] == 0).any()):
        raise ValueError(
            f"feature {index} holds several packed sequences (its position_ids restart, or it has seq_lengths); turn "
            f"packing off: the collator packs, and shares what they have in common"
        )
    if lengths is not None and len(lengths) and lengths[0] != len(feature["input_ids"]):
        num_tokens = len(feature["input_ids"])
        raise ValueError(f"feature {index}: seq_lengths is {lengths[0]}, input_ids has {num_tokens} entries")


def _column(feature: Mapping[str, Any], name: str, ids: IntArray, index: int, kinds: str = "iu") -> IntArray:
    """An entry that is as long as `input_ids`."""
    values = _integers(feature, name, index, kinds)
    if len(values) != len(ids):
        raise ValueError(f"feature {index}: {name} has {len(values)} entries, input_ids has {len(ids)}")
    return values


def _mask(feature: Mapping[str, Any], name: str, ids: IntArray, index: int) -> npt.NDArray[np.bool_]:
    """True for 1. `count_nonzero`, because it takes 0.4 us for 128 entries, and `any` 2.2."""
    values = _column(feature, name, ids, index, "iub")
    mask = values == 1
    if np.count_nonzero(mask) != np.count_nonzero(values):
        place = int(((values != 0) & ~mask).argmax())
        raise ValueError(f"feature {index}: {name} must be 0 or 1: {name}[{place}] = {values[place]}")
    return mask


def _integers(feature: Mapping[str, Any], name: str, index: int, kinds: str = "iu") -> IntArray:
    """kinds: NumPy's letters of the dtypes that are accepted."""
    wanted = f"a flat list of {'integers or booleans' if 'b' in kinds else 'integers'}"
    values = _array(feature, name, wanted, index)
    dtype = values.dtype
    is_wrong = dtype.kind not in kinds or (dtype.kind == "u" and dtype.itemsize == 8)  # int64 does not hold those
    if values.ndim != 1 or (is_wrong and len(values)):
        raise _wrong_type(name, wanted, f"{dtype} {values.shape}", index)
    return values.astype(np.int64, copy=False)


def _array(feature: Mapping[str, Any], name: str, wanted: str, index: int) -> np.ndarray:
    try:
        return np.asarray(feature[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        raise _wrong_type(name, wanted, f"a {type(feature[name]).__name__} that NumPy cannot read", index) from None


def _wrong_type(name: str, wanted: str, came: str, index: int) -> ValueError:
    return ValueError(f"feature {index}: {name} must be {wanted}, got {came}")


def _check_not_negative(name: str, arrays: Sequence[FeatureArrays]) -> None:
    """All features at once: checking each by itself took 4 us for each, longer than the prefix plan."""
    given = {index: values for index, each in enumerate(arrays) if (values := getattr(each, name)) is not None}
    ignored = IGNORE_INDEX if name == "labels" else 0
    together = np.concatenate([*given.values(), np.zeros(0, dtype=np.int64)])
    if not ((together < 0) & (together != ignored)).any():
        return
    for index, values in given.items():
        if (is_wrong := (values < 0) & (values != ignored)).any():
            raise _negative(name, values, int(is_wrong.argmax()), arrays[index].num_left_padding, index)


def _check_in_all(name: str, arrays: Sequence[FeatureArrays]) -> None:
    """Floats for which no number stands if they are missing."""
    has = next((index for index, feature in enumerate(arrays) if getattr(feature, name) is not None), None)
    if has is None:
        return
    for index, feature in enumerate(arrays):
        if getattr(feature, name) is None and feature.num_labels:
            raise ValueError(f"feature {index} bears loss and has no {name}, but feature {has} has some")


def _negative(name: str, values: IntArray, place: int, num_left_padding: int, index: int) -> ValueError:
    entry = f"{name}[{num_left_padding + place}] = {values[place]}"
    return ValueError(f"feature {index}: {name} must not be negative: {entry}")


def _token_floats(feature: Mapping[str, Any], labels: npt.NDArray[np.int64], index: int) -> dict[str, FloatArray]:
    """The floats that a feature has, each (L,), 0 on tokens without a label, whatever is given there.

    labels: (L,). index: of the feature, for the error.

    Raises ValueError that names the feature and the entry for: two names of the same floats; what is not a flat list of
    numbers as long as the labels (or one number, for advantages); a number on a labelled token that float32 does not
    hold.
    """
    given = {}
    for name, entries in FLOATS.items():
        named = [entry for entry in entries if feature.get(entry) is not None]
        if len(named) > 1:
            raise ValueError(f"feature {index} has {' and '.join(named)}, two names of the same weights; remove one")
        if named:
            given[name] = _floats(feature, named[0], labels, index)
    return given


def _floats(feature: Mapping[str, Any], name: str, labels: npt.NDArray[np.int64], index: int) -> FloatArray:
    wanted = "a flat list of numbers" + (" or one number" if name in ONE_FOR_ALL else "")
    values = _array(feature, name, wanted, index)
    is_one_for_all = name in ONE_FOR_ALL and values.ndim == 0
    if values.dtype.kind not in "fiu" or not (values.ndim == 1 or is_one_for_all):
        raise _wrong_type(name, wanted, f"{values.dtype} {values.shape}", index)
    if values.ndim == 1 and len(values) != len(labels):
        raise ValueError(f"feature {index}: {name} has {len(values)} entries, input_ids has {len(labels)}")
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.where(labels != IGNORE_INDEX, values, 0).astype(np.float32)
    if not np.isfinite(floats).all():
        place = int((~np.isfinite(floats)).argmax())
        came = values if is_one_for_all else values[place]
        raise ValueError(f"feature {index}: {name} must be finite on labelled tokens: {name}[{place}] = {came}")
    return floats


def check_no_floats(arrays: Sequence[FeatureArrays]) -> None:
    """Refuse features with floats for a batch whose loss the model computes, and which would ignore them.

    Raises ValueError that names the feature and the entry.
    """
    for index, feature in enumerate(arrays):
        for name in FLOATS:
            if getattr(feature, name) is not None:
                raise ValueError(
                    f"feature {index} has {name}, which the loss of a Hugging Face model ignores, so that its gradient "
                    f"would be another. Collate with merge_labels=True and take radixtrain's loss "
                    f"(radixtrain.loss.linear_cross_entropy, or linear_logprobs and clipped_policy_loss), or remove "
                    f"the entry"
                )


def _check_unread(entries: Mapping[str, Any], index: int) -> None:
    """Refuse an image, video or audio, also as a path, and any other entry that could be an input of a model.

    Ignored are `HARMLESS` names, and text, None, a dict, a date or a list of those.

    entries: those of a feature that the collator does not read. index: of the feature, for the error.

    Raises ValueError that names the feature and the entry.
    """
    for name, value in entries.items():
        if name in _MEDIA and _holds_nothing(value):
            continue  # a feature without media, in a data set whose other features have some
        if name in _MEDIA or not (name in HARMLESS or isinstance(value, _METADATA) or _is_metadata(value)):
            reason = next(reason for pattern, reason in _UNREAD.items() if re.search(pattern, str(name)))
            raise ValueError(f"feature {index}: {name} ({_kind_of(value)}) {reason}")


def _holds_nothing(value: Any) -> bool:
    leaf = _first_leaf(value)
    return leaf is None or (hasattr(leaf, "__len__") and len(leaf) == 0)


def _is_metadata(value: Any) -> bool:
    """Text, None, a dict, a date or a list of those, judged by its first entry: no model takes one as input."""
    leaf = _first_leaf(value)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O":
        return _is_metadata(leaf.tolist())
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "USMm"
    return isinstance(leaf, _METADATA)


def _first_leaf(value: Any) -> Any:
    """The first entry of nested lists that is not None; None if there is no other."""
    if not isinstance(value, list | tuple):
        return value
    return next((leaf for leaf in map(_first_leaf, value) if leaf is not None), None)


def _kind_of(value: Any) -> str:
    shape = getattr(value, "shape", None)
    size = f" of {len(value)}" if isinstance(value, list | tuple) else f" of shape {tuple(shape)}" if shape else ""
    return f"{type(value).__name__}{size}"
