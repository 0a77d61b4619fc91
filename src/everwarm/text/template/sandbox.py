"""Runs templates that nobody vouches for: a Jinja program out of a model file.

In: its source and plain data (JSON types). Out: the text it writes, or a TemplateError in one line. The dialect is
that of Hugging Face transformers: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{%
generation %}`.

Invariant: every loop turn, call, filter, test and growing operator passes the meter before it makes anything, so that
neither loops, nor recursion, nor `'a' * 10**9`, nor lists of lists of lists end in a hang or in exhausted memory. A
separate process with resource limits would bound the same by force, but costs 50 ms to start and a pipe for each
prompt.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from traceback import clear_frames
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from everwarm.errors import RequestError, TemplateError
from everwarm.text.template import meter as cost
from everwarm.text.template.filters import FILTERS, TESTS, TemplateNamespace, bounded_range, metered
from everwarm.text.template.meter import Meter, Refused, meter
from everwarm.text.template.output import collected
from everwarm.text.template.rewrite import Rewriter
from everwarm.text.template.tokens import ControlTokens, unmarked

SOURCE_LIMIT = 1 << 16
"""Characters of a template. Real ones have up to 20,000; compiling the worst of this length takes 2 s."""


class Program:
    """A compiled template. It may run in several threads at once."""

    def __init__(self, source: str, tokens: ControlTokens, now: Callable[[], datetime], meter: Meter) -> None:
        """Compile; raises TemplateError naming the line. `now` is what `strftime_now` formats; `meter` counts the
        marking of control tokens.
        """
        if len(source) > SOURCE_LIMIT:
            raise TemplateError(
                f"chat template: {len(source):,} characters, more than {SOURCE_LIMIT:,}; use a raw prompt (--raw)"
            )
        sandbox = Sandbox(now)
        rewriter = Rewriter(sandbox, tokens.mark)
        try:
            tree = sandbox.parse(source)
            self.variables = frozenset(find_undeclared_variables(tree))
            with cost.running(meter):
                rewriter.visit(tree)
            self._template = jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.globals)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {one_line(error.message)}") from error
        except Refused as error:
            raise TemplateError(f"chat template: {error}") from error
        except Exception as error:  # Jinja computes constants meanwhile: anything may come out of that
            raise TemplateError(f"chat template: it can't be compiled: {one_line(error)}") from error
        self.literals = frozenset(rewriter.literals)

    def run(self, variables: Mapping[str, object], watch: Callable[[str], None] | None = None) -> str:
        """Render plain data; the meter that runs counts what it costs. `watch` sees what is written, while it is long
        and grows; it may raise RequestError.
        """
        try:
            return collected(self._template.generate(variables), watch)
        except RequestError:
            raise
        except RaisedByTemplate as error:
            raise TemplateError(f"the chat template refuses these messages: {one_line(error)}") from error
        except Exception as error:  # it is someone else's program: anything may come out of it
            message = f"chat template{_line_of(error)}: {one_line(error) or type(error).__name__}"
            clear_frames(error.__traceback__)  # its values would live on in cycles until the next garbage collection
            raise TemplateError(message) from error


class RaisedByTemplate(Exception):  # noqa: N818 - a message on its way out, not a fault
    """How `raise_exception(...)` leaves the template."""


class Generation(Extension):
    """`{% generation %}` tells transformers which text the assistant wrote; here it only scopes its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way to declare it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse up to the end tag."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_UNBOUNDED = frozenset({"encode", "expandtabs", "maketrans", "striptags", "translate", "unescape"})
"""Methods of texts that make much out of little, or that no template needs."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that the compiled template asks for everything it does."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        """Nothing but what is listed here can be named in a template."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            finalize=_written,
            cache_size=0,
        )
        self.filters = {name: metered(function) for name, function in FILTERS.items()}
        # what the rewriter puts into the template; they count by themselves
        self.filters |= {"turn": _turn, "made": _accounted, "sliced": _sliced, "joined": _joined, "unmarked": unmarked}
        self.tests = {name: metered(function) for name, function in TESTS.items()}
        self.globals = {
            "range": bounded_range,
            "joiner": self.globals["joiner"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(_fit_time(form)),
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """On top of Jinja's rules: of texts only the methods that `call` can bound, of numbers none."""
        if isinstance(obj, int | float | bytes | GeneratorType | type) or (isinstance(obj, str) and attr in _UNBOUNDED):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own guard of `str.format`, behind a bound."""
        guarded = super().wrap_str_format(value)
        if guarded is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            cost.fit_format(value.__self__, "{", [args, kwargs])
            return guarded(*args, **kwargs)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template: functions, macros, methods."""
        meter().tick()
        if isinstance(obj, BuiltinMethodType | MethodType) and isinstance(obj.__self__, str):
            args = _fit_method(obj.__name__, obj.__self__, args, kwargs)
        elif len(args) + len(kwargs) > 1 or any(isinstance(arg, tuple) for arg in args):
            # a macro finds its arguments in a tuple, a container that nobody wrote down
            meter().expanded([*args, *kwargs.values()])
        return meter().account(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every operator that makes something large out of something small."""
        meter().tick()
        if operator == "*":
            cost.fit_product(left, right)
        elif operator == "**":
            cost.fit_power(left, right)
        elif operator == "%" and isinstance(left, str):
            cost.fit_format(left, "%", right)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter().fit(len(left) + len(right))
        return meter().account(super().call_binop(context, operator, left, right))


def one_line(text: object) -> str:
    """The words of a message, without line breaks, and not endless."""
    return str(unmarked(" ".join(str(text)[:3000].split())[:300]))


def _line_of(error: BaseException) -> str:
    """Where in the template: Jinja rewrites tracebacks so that its frames carry the template's own line numbers."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""


def _raise_exception(message: object = "") -> None:
    raise RaisedByTemplate(message)


def _fit_time(form: str) -> str:
    """A format of dates. The system's buffer for one may grow to 256 times its length."""
    if isinstance(form, str):
        cost.fit_number(len(form), 1000, "strftime_now: a format of length")
    return form


def _sliced(value: Any) -> Any:
    """A copy of a part; what is in a list is shared with the whole."""
    if isinstance(value, str):
        return meter().account(value)
    meter().tick(16 * len(value) if isinstance(value, list | tuple) else 0)
    return value


def _accounted(value: Any) -> Any:
    """Each container that is written down."""
    return meter().account(value)


def _written(value: Any) -> Any:
    """What is written to the output."""
    size = meter().expanded(value)
    meter().fit(size)
    meter().tick(size)
    meter().write(size)
    return value


def _turn(written: int) -> bool:
    """One turn of a loop whose body writes that many characters of literal text."""
    meter().tick(written)
    meter().write(written)
    return True


def _joined(*parts: Any) -> str:
    """The `~` operator."""
    meter().tick(meter().expanded(parts))
    return "".join(map(str, parts))


_ESCAPED = 5
"""What `Markup` escapes grows so many times at most: `"` becomes `&#34;`."""


def _fit_method(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Bound a method of `str` before it runs; complaints about wrong arguments are left to the method itself.

    The methods of `Markup`, which `safe` and `escape` make, are written in Python: they escape what they are given,
    and take keywords where those of `str` don't.
    """
    growth = _ESCAPED if isinstance(text, Markup) else 1
    if growth > 1 and kwargs and name not in ("format", "split", "rsplit", "splitlines"):
        raise Refused(f"{name}: no keywords")
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        cost.fit_replace(text, args[0], args[1] * growth)
    elif name == "join" and args and isinstance(args[0], Iterable):
        args = (list(args[0]), *args[1:])
        cost.fit_join(text, args[0], growth)
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        meter().fit(args[0])
    else:
        for wanted in (*args, *kwargs.values()):
            if name.endswith("split"):
                cost.fit_split(text, wanted)
            if name.startswith("r") or name.endswith("strip"):
                cost.fit_search(text, wanted)
    return args
