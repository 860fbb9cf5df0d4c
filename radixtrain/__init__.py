"""radixtrain: fine-tune on unique tokens. Shared prompts are computed once, forward and backward, with the same
gradient.

The public names are loaded when they are first used: `import radixtrain` alone imports neither torch nor
transformers.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `_HOMES`, as type checkers and editors read it
    from radixtrain.attention import tree_attention
    from radixtrain.collators.prefix_sampler import PrefixGroupedSampler
    from radixtrain.collators.radix import RadixCollator
    from radixtrain.collators.steps import StepCollator
    from radixtrain.generation.cache import RadixCache
    from radixtrain.generation.generate import generate
    from radixtrain.generation.score import score_completions
    from radixtrain.hf.guards.code import position_wise
    from radixtrain.hf.predicting_rows import step_losses
    from radixtrain.hf.share import restore_model, share_prefixes, sharing_report
    from radixtrain.plugins.trainer_callback import log_sharing
    from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
    from radixtrain.verification.equivalence import verify_equivalence

__version__ = "0.2.0"
__all__ = [
    "PrefixGroupedSampler",
    "PrefixPlan",
    "RadixCache",
    "RadixCollator",
    "StepCollator",
    "build_prefix_plan",
    "generate",
    "log_sharing",
    "position_wise",
    "restore_model",
    "score_completions",
    "share_prefixes",
    "sharing_report",
    "step_losses",
    "tree_attention",
    "verify_equivalence",
]

_HOMES = {
    "PrefixGroupedSampler": "radixtrain.collators.prefix_sampler",
    "PrefixPlan": "radixtrain.tree.plan",
    "RadixCache": "radixtrain.generation.cache",
    "RadixCollator": "radixtrain.collators.radix",
    "StepCollator": "radixtrain.collators.steps",
    "build_prefix_plan": "radixtrain.tree.plan",
    "generate": "radixtrain.generation.generate",
    "log_sharing": "radixtrain.plugins.trainer_callback",
    "position_wise": "radixtrain.hf.guards.code",
    "restore_model": "radixtrain.hf.share",
    "score_completions": "radixtrain.generation.score",
    "share_prefixes": "radixtrain.hf.share",
    "sharing_report": "radixtrain.hf.share",
    "step_losses": "radixtrain.hf.predicting_rows",
    "tree_attention": "radixtrain.attention",
    "verify_equivalence": "radixtrain.verification.equivalence",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_home(name), name)
    raise AttributeError(f"module 'radixtrain' has no attribute {name!r}")


def _home(name: str) -> ModuleType:
    """Import the module of a public name. If that fails, name a package that is too old, if there is one."""
    try:
        return import_module(_HOMES[name])
    except (AttributeError, ImportError) as error:
        from radixtrain.versions import check_versions

        check_versions()
        # Python takes an AttributeError for a name that does not exist: "cannot import name 'share_prefixes'".
        raise ImportError(f"radixtrain.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted(__all__)
