"""A chat template out of a model file, run with bounds on memory and time.

The template is a program that somebody else wrote. Jinja's immutable sandbox keeps it from the
interpreter; this keeps it from the machine: what it joins, repeats or pads is counted before it is
made, loops and calls are counted, and filters no chat template needs are not there. Counted against
what the messages hold, so that a long conversation may be long. Not bounded is a single comparison
of lists built to compare for ever; docs/engine.md says so.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agent.engine.types import ChatTemplateError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jinja2.compiler import Frame
    from jinja2.runtime import Context

SOURCE_CHARACTERS: Final = 1 << 18
# One text: this, and eight times what the messages hold. All that is ever made: 64 times as much.
TEXT_CHARACTERS: Final = 1 << 20
_SHARE: Final = 8
_MADE: Final = 64
STEPS: Final = 1 << 20
CPU_S: Final = 2.0
_NUMBER_BITS: Final = 1 << 16
_COUNT_MAX: Final = 1 << 16
_FILTERS: Final = frozenset(
    {
        "abs",
        "attr",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "forceescape",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "striptags",
        "sum",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "urlencode",
        "wordcount",
    }
)
# Those that make a text of whatever they are given.
_TEXT_FILTERS: Final = frozenset(
    {
        "capitalize",
        "e",
        "escape",
        "forceescape",
        "indent",
        "join",
        "lower",
        "replace",
        "safe",
        "string",
        "striptags",
        "title",
        "tojson",
        "trim",
        "truncate",
        "upper",
        "urlencode",
        "wordcount",
    }
)
_REFUSED_METHODS: Final = frozenset(
    {
        "center",
        "encode",
        "expandtabs",
        "format_map",
        "ljust",
        "maketrans",
        "rjust",
        "to_bytes",
        "translate",
        "zfill",
    }
)
# A width or precision of four digits, or one that is an argument.
_PADDING: Final = re.compile(r"[0-9]{4}|\*")


class _RefusalError(TemplateError):
    """Raised by a template through `raise_exception`."""


class _BoundError(TemplateError):
    """The template wants more than it may have."""


class ChatTemplate:
    """A compiled template; thread safe. Raises `ModelFileError` for one that is none."""

    def __init__(self, source: str) -> None:
        if len(source) > SOURCE_CHARACTERS:
            raise ModelFileError(f"the chat template has more than {SOURCE_CHARACTERS} characters")
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._environment.begin(0)
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as problem:
            raise ModelFileError(f"malformed chat template: {problem}") from None
        except (RecursionError, MemoryError, SyntaxError):
            raise ModelFileError("malformed chat template: nested too deeply") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt; raises `ChatTemplateError`, whose message shows no message."""
        self._environment.begin(_weight(messages, 1 << 40))
        try:
            text = self._template.render(messages=messages, **variables)
            if not text.isascii():
                text.encode()  # half a surrogate pair is no text
        except (_RefusalError, _BoundError) as problem:
            detail = str(problem)
        # A template is a program from a file: whatever it raises is its refusal.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as problem:
            detail = type(problem).__name__
        else:
            return text
        raise ChatTemplateError(f"the chat template refused the messages: {detail}")


class _Budget(threading.local):
    """What the rendering on this thread may still do."""

    text: int = 0
    made: int = 0
    steps: int = 0
    deadline: float = 0.0


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja's name
        """Join through the environment, which counts."""
        self.write("environment.join_pieces((")
        for piece in node.nodes:
            self.visit(piece, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._budget = _Budget()
        self.step = _step
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals = {
            name: value for name, value in self.globals.items() if name in {"dict", "namespace"}
        } | {
            "range": self.globals["range"],
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
        }
        self.filters["tojson"] = self._to_json
        self.filters = {
            name: self._counted(name, filter_)
            for name, filter_ in self.filters.items()
            if name in _FILTERS
        }

    def begin(self, weight: int) -> None:
        """Give this thread's rendering its budget for messages of `weight` characters."""
        self._budget.text = TEXT_CHARACTERS + _SHARE * weight
        self._budget.made = _MADE * self._budget.text
        self._budget.steps = STEPS + weight
        self._budget.deadline = time.thread_time() + CPU_S

    def _tick(self) -> None:
        budget = self._budget
        budget.steps -= 1
        if budget.steps < 0 or (not budget.steps & 15 and time.thread_time() > budget.deadline):
            raise _BoundError("it takes too long")

    def _make(self, size: int) -> None:
        """Count a text or list of `size`, before it is made where it could be a large one."""
        budget = self._budget
        budget.made -= size
        if size > budget.text or budget.made < 0:
            raise _BoundError("it makes too much text")

    def _weigh(self, value: Any) -> int:
        weight = _weight(value, self._budget.text)
        self._make(weight)
        return weight

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(self._tick_node(loop.lineno), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(self._tick_node(loop.lineno), loop.test, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def _tick_node(self, lineno: int) -> nodes.Call:
        return nodes.Call(
            nodes.EnvironmentAttribute("step", lineno=lineno), [], [], None, None, lineno=lineno
        )

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call for the template, counted."""
        self._tick()
        if obj is _step:
            return True
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | int):
            self._method(owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def _method(self, owner: object, name: str, args: tuple[Any, ...]) -> None:
        if name in _REFUSED_METHODS:
            raise _BoundError(f"{name}() is not available")
        if not isinstance(owner, str):
            return
        if name == "replace" and len(args) > 1:
            self._make_replaced(owner, args[0], args[1])
        elif name == "join" and args:
            self._make_joined(args[0], owner)
        else:
            self._make(len(owner))

    def _make_replaced(self, text: Any, old: Any, new: Any) -> None:
        size = self._weigh(text)
        # Where it is no text it becomes one, with at most as many places as it has characters.
        found = text.count(old) if isinstance(text, str) and isinstance(old, str) else size + 1
        self._make(size + found * _weight(new, self._budget.text))

    def _make_joined(self, values: Any, between: Any) -> None:
        count = len(values) if hasattr(values, "__len__") else _COUNT_MAX
        self._make(self._weigh(values) + count * _weight(between, self._budget.text))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Work out `left operator right`, counted."""
        if operator == "+":
            if type(left) is str and type(right) is str:
                self._make(len(left) + len(right))
                return left + right
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self._make(len(left) + len(right))
        elif operator == "*":
            self._make_repeated(left, right)
            self._make_repeated(right, left)
        elif operator == "%" and isinstance(left, str):
            if _PADDING.search(left):
                raise _BoundError("a width of more than 999 is not available")
            self._make(len(left) + 999 * left.count("%"))
            self._make((1 + left.count("%")) * _weight(right, self._budget.text))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def _make_repeated(self, value: Any, times: Any) -> None:
        if not isinstance(times, int):
            return
        if isinstance(value, str | list | tuple):
            self._make(len(value) * max(times, 0))
        elif isinstance(value, int):
            self._check_bits(value.bit_length() + times.bit_length())

    def _check_bits(self, bits: int) -> None:
        if bits > _NUMBER_BITS:
            raise _BoundError("a number is too large")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap `str.format`: without widths, and counted."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text = value.__self__

        def counted(*args: Any, **kwargs: Any) -> str:
            if ":" in text:
                raise _BoundError("a format specification is not available")
            self._make(len(text))
            self._make((1 + text.count("{")) * _weight((args, kwargs), self._budget.text))
            return inner(*args, **kwargs)

        return counted

    def _output(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._weigh(value)
        return value

    def join_pieces(self, pieces: tuple[Any, ...]) -> str:
        """Return `a ~ b`."""
        self._make(sum(_weight(piece, self._budget.text) for piece in pieces))
        return "".join(map(str, pieces))

    def _concat(self, pieces: Iterable[str]) -> str:
        most, size, taken = self._budget.text, 0, []
        for piece in pieces:
            size += len(piece)
            if size > most:
                break
            taken.append(piece)
        self._make(size)
        return "".join(taken)

    def _to_json(self, value: Any, indent: int | None = None) -> str:
        if indent is None:
            return json.dumps(value, ensure_ascii=False)
        # Nested deeply, its white space could be any multiple of its text.
        return self._concat(json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value))

    def _counted(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        passes = hasattr(filter_, "jinja_pass_arg")

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._tick()
            value, *rest = args[1:] if passes else args
            self._check_filter(name, value, [*rest, *kwargs.values()])
            result = filter_(*args, **kwargs)
            if isinstance(result, str | list | tuple):
                self._make(len(result))
            return result

        counted.__dict__.update(getattr(filter_, "__dict__", {}))
        return counted

    def _check_filter(self, name: str, value: Any, rest: list[Any]) -> None:
        if any(isinstance(arg, int) and abs(arg) > _COUNT_MAX for arg in rest):
            raise _BoundError(f"{name}: a number is too large")
        if name in _TEXT_FILTERS:
            size = 0 if isinstance(value, str) else self._weigh(value)
            if name == "replace" and len(rest) > 1:
                self._make_replaced(value, rest[0], rest[1])
            elif name == "join":
                self._make_joined(value, rest[0] if rest else "")
            elif name == "indent":
                lines = 1 + (value.count("\n") if isinstance(value, str) else size)
                width = rest[0] if rest else 4
                self._make(lines * (width if isinstance(width, int) else _weight(width, 1 << 20)))
        elif name == "list" and hasattr(value, "__len__"):
            self._make(len(value))
        elif name == "sum" and not all(isinstance(arg, int | float | str) for arg in rest):
            raise _BoundError("sum: only of numbers")


def _weight(value: Any, most: int) -> int:
    """Return about how many characters `value` has as a text; stops counting beyond `most`."""
    if isinstance(value, str):
        return len(value)
    weight, left = 0, [value]
    while left and weight <= most:
        item = left.pop()
        weight += 2
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, dict):
            left.extend(item.keys())
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
        elif isinstance(item, int):
            weight += item.bit_length() // 3
        elif not isinstance(item, Undefined):
            weight += 32
    return weight


def _step() -> bool:
    """Stand at the beginning of a loop's body: calling it is what counts."""
    return True


def _raise(message: str) -> None:
    raise _RefusalError(str(message)[:200])


def _strftime_now(form: str) -> str:
    if len(form) > 100 or _PADDING.search(form):
        raise _BoundError("strftime_now: the format is too long")
    return dt.datetime.now(dt.UTC).strftime(form)
