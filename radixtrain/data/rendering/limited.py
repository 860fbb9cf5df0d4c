"""Chat templates that keep an account of what they do: transformers' own, compiled with a count in every loop.

transformers compiles a template where it renders one, inside of `apply_chat_template`. `limit` names a template, and
from then on what transformers compiles of it, in this process, is ours. Every other template stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from radixtrain.data.rendering.limits import Account, TemplateLimitError, check_length, join_pieces

__all__ = ["limit"]

# Filters that neither go through an iterator nor make more of a value than it is, and so need no account.
HARMLESS = {
    *("length", "count", "first", "last", "random", "default", "d", "attr", "items", "abs", "int", "float", "min"),
    *("max", "trim", "upper", "lower", "capitalize", "string", "safe", "e", "escape", "forceescape", "reverse"),
}
SLOW = {"urlize", "wordwrap", "striptags", "pprint", "xmlattr", "truncate", "wordcount", "urlencode", "title"}
MAX_FOR_SLOW = 1 << 20  # characters: these filters take up to a microsecond for each, and cannot be stopped
OF_VALUES = {"map", "select", "reject", "selectattr", "rejectattr", "sum"}  # whose numbers are values and no sizes
SUMMANDS = 4  # of a sum that is written and not kept: before it is counted, it may be so many times too long
LIMITED: set[str] = set()


def limit(template: Any) -> None:
    """From now on, renderings of this chat template keep an account. template: a source, or several by name."""
    if isinstance(template, str):
        if template not in LIMITED:
            _install()
            LIMITED.add(template)
    elif isinstance(template, Mapping):
        for each in template.values():
            limit(each)


@functools.cache
def _install() -> None:
    from transformers.utils import chat_template_utils

    original: Any = chat_template_utils._compile_jinja_template

    @functools.lru_cache(maxsize=32)
    def limited(source: str) -> Any:
        # The environment of an empty template: transformers makes a new one for each, with filters of its own.
        return _limited(original.__wrapped__("").environment).from_string(source)

    def compiled(source: str) -> Any:
        return limited(source) if source in LIMITED else original(source)

    module: Any = chat_template_utils
    module._compile_jinja_template = compiled


def _limited(environment: Any) -> Any:
    """transformers' environment of one template, which now makes templates that keep an account."""
    environment.__class__ = _Environment
    environment.concat = join_pieces
    environment.globals.pop("lipsum", None)  # words by chance, and any number of them
    environment.globals["namespace"] = type("Namespace", (environment.globals["namespace"],), {"__repr__": _no_text})
    environment.filters = {
        name: function if name in HARMLESS else _filter(name, function)
        for name, function in environment.filters.items()
    }
    return environment


def _no_text(namespace: Any) -> str:
    """A namespace is the only thing that can be put into itself, so its text may have no end."""
    raise TemplateLimitError("writes a namespace as text")


class _Template(jinja2.Template):
    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """What transformers calls to see where the generation markers are."""
        length = 0
        for piece in super().generate(*args, **kwargs):
            length += len(piece)
            check_length(length)
            yield piece


class _Context(Context):
    """The variables of one rendering, and its account."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.account = Account()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Of a block: it goes on with the same account."""
        context: Any = super().derived(locals)
        context.account = self.account
        return context


class _Generator(CodeGenerator):
    """Writes the Python code of a template, with calls of the account in it."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:
        if node.test is not None:
            node.test = nodes.And(nodes.ContextReference(), node.test)
        node.body.insert(0, nodes.ExprStmt(nodes.ContextReference()))
        super().visit_For(node, frame)

    def visit_ContextReference(self, node: nodes.ContextReference, frame: Any) -> None:
        """No source has this node: it stands for a step."""
        self.write("context.account.step()")

    def visit_Output(self, node: nodes.Output, frame: Any) -> None:
        for each in node.nodes:
            parts = list(_parts_of(each))
            if sum(not isinstance(part, nodes.Const | nodes.Add | nodes.Concat) for part in parts) <= SUMMANDS:
                for part in parts:
                    part.is_written = True  # type: ignore[attr-defined]
        super().visit_Output(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:
        self._made(super().visit_Add, node, frame, is_kept=not hasattr(node, "is_written"))

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self._made(super().visit_Concat, node, frame, is_kept=not hasattr(node, "is_written"))

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._made(super().visit_List, node, frame, is_kept=not _is_constant(node.items))

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        self._made(super().visit_Tuple, node, frame, is_kept=node.ctx == "load" and not _is_constant(node.items))

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._made(super().visit_Dict, node, frame, is_kept=True)

    def _made(self, visit: Callable[..., None], node: Any, frame: Any, is_kept: bool) -> None:
        self.write("context.account.made(" if is_kept else "(")
        visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    context_class = _Context
    template_class = _Template
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        context.account.allow_operation(operator, left, right)
        return context.account.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A macro, or a method of a value. The names are Jinja's, so that a keyword may be any other."""
        account = __context.account
        account.step()
        if __obj.__class__ is BuiltinMethodType and isinstance(__obj.__self__, str):
            account.allow_method(__obj.__self__, __obj.__name__, (*args, *kwargs.values()))
        elif __obj.__class__ is FunctionType and hasattr(__obj, "__wrapped__"):  # Jinja's own, in place of `format`
            account.allow_format(__obj.__wrapped__.__self__, [*args, *kwargs.values()])
        return account.made(super().call(__context, __obj, *args, **kwargs))


def _parts_of(expression: nodes.Node) -> Iterator[nodes.Node]:
    """A sum and what it is of: `a + (b ~ c)` and its parts."""
    yield expression
    if isinstance(expression, nodes.Add | nodes.Concat):
        for part in expression.iter_child_nodes():
            yield from _parts_of(part)


def _is_constant(items: list[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that keeps the account of the rendering."""
    passed = {
        _PassArg.context: lambda context: (context,),
        _PassArg.eval_context: lambda context: (context.eval_ctx,),
        _PassArg.environment: lambda context: (context.environment,),
        None: lambda context: (),
    }
    first = passed[_PassArg.from_obj(function)]

    @jinja2.pass_context
    def limited(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        account = context.account
        account.step()
        if isinstance(value, Iterator):
            value = list(account.counted(value)) if name == "join" else account.counted(value)
        _check(account, name, value, (*args, *kwargs.values()))
        made = function(*first(context), value, *args, **kwargs)
        return account.counted(made) if isinstance(made, Iterator) else account.made(made)

    return limited


def _check(account: Account, name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Before a filter runs: whether what it makes is allowed."""
    if name in SLOW and account.weight(value) > MAX_FOR_SLOW:
        raise TemplateLimitError(f"has the filter {name} of a text of more than {MAX_FOR_SLOW:,} characters")
    if name not in OF_VALUES:
        account.allow_width(*args)
    if name == "format":
        account.allow_format(str(value), list(args))
    elif name == "replace":
        account.allow_method(str(value), name, args)
    elif name == "join" and isinstance(value, list | tuple):
        account.allow(account.weight(value) + len(value) * max(map(_width, args), default=0))
    elif name == "indent":
        account.allow((1 + str(value).count("\n")) * max(map(_width, args), default=0))
    elif name == "tojson" and args:
        account.allow(account.weight(value) * max(map(_width, args)))


def _width(value: Any) -> int:
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 1
