"""Functions in LLVM's language, written as Python that computes with values.

A function of Python that is given values, or named tuples of them, becomes one of LLVM. Operators,
loops and branches add instructions to it, and the functions that it calls follow it:

    def double(code: Code, x: Pointer, y: Pointer, count: Integer) -> None:
        with code.loop(0, count, code.lanes) as at:
            (y + at).store((x + at).load() * 2.0)

    text = Code(lanes=8).text(double)

Nothing runs before `runtime.machine.machine_code` has compiled the text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

BYTES = {"i1": 0, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8}
FLOATS = {"half": "f16", "bfloat": "bf16", "float": "f32"}
PARAMETERS = {"Integer": "i64", "Truth": "i1", "Float": "float", "Pointer": "ptr", "Aligned": "ptr"}


def hexadecimal(value: float) -> str:
    """A float32 as LLVM writes it: the bits of the double that it is."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    (bits,) = struct.unpack("<Q", struct.pack("<d", rounded))
    return f"0x{bits:016X}"


def _operator(of_integers: str, of_floats: str = "", of: str = "") -> Callable[[Value, Any], Value]:
    def combined(first: Value, second: Number) -> Value:
        sign = "s" if first.of == "i32" else "u"
        name = of_floats if first.of in FLOATS else of_integers.format(sign)
        return first.made(f"{name} {first.typed}, {first.like(second).text}", of)

    return combined


class Value:
    """A number that code has when it runs, or a vector of so many lanes.

    An operator takes two values of a type, or one and a number of Python. Integers of 32 bits are
    compared with their signs; those of 64 bits have none.
    """

    __slots__ = ("code", "lanes", "of", "text")

    def __init__(self, code: Code, text: str, of: str = "i64", lanes: int = 0) -> None:
        self.code, self.text, self.of, self.lanes = code, text, of, lanes

    __add__, __sub__ = _operator("add", "fadd"), _operator("sub", "fsub")
    __mul__, __truediv__ = _operator("mul", "fmul"), _operator("", "fdiv")
    __floordiv__, __mod__ = _operator("udiv"), _operator("urem")
    __and__, __or__ = _operator("and"), _operator("or")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    __lt__ = _operator("icmp {}lt", "fcmp olt", "i1")
    __le__ = _operator("icmp {}le", "fcmp ole", "i1")
    __gt__ = _operator("icmp {}gt", "fcmp ogt", "i1")
    __ge__ = _operator("icmp {}ge", "fcmp oge", "i1")
    equals = _operator("icmp eq", "fcmp oeq", "i1")

    def __neg__(self) -> Value:
        return self.made(f"fneg {self.typed}")

    @property
    def type(self) -> str:
        return f"<{self.lanes} x {self.of}>" if self.lanes else self.of

    @property
    def typed(self) -> str:
        return f"{self.type} {self.text}"

    @property
    def suffix(self) -> str:
        """Its type in the names of LLVM's own functions."""
        return f"v{self.lanes}" * bool(self.lanes) + FLOATS.get(self.of, self.of)

    def made(self, instruction: str, of: str = "", lanes: int | None = None) -> Value:
        """The value that an instruction makes: of this one's type, where no other is named."""
        name = self.code.name("%v")
        self.code.line(f"{name} = {instruction}")
        return Value(self.code, name, of or self.of, self.lanes if lanes is None else lanes)

    def like(self, other: Number) -> Value:
        """A number as a value of this type."""
        return self.code.value(other, self.of, self.lanes)

    def view(self, of: str, how: str = "bitcast") -> Value:
        """The same bits as another type."""
        to = Value(self.code, "", of, self.lanes)
        return to.made(f"{how} {self.typed} to {to.type}")

    def astype(self, of: str) -> Value:
        """The number as another type: integers become wider without a sign, floats with theirs."""
        wider = BYTES[of] > BYTES[self.of]
        if self.of in FLOATS:
            return self.view(of, "fpext" if wider else "fptrunc")
        return self.view(of, "sitofp" if of in FLOATS else "zext" if wider else "trunc")

    def pointer(self, aligned: bool = False) -> Pointer:
        """An address as where float32 numbers lie."""
        return Pointer(self.code, self.text, "float", aligned)

    def splat(self, lanes: int = 0) -> Value:
        """A vector with the number in each lane."""
        to = Value(self.code, "poison", self.of, lanes or self.code.lanes)
        return to.put(0, self).shuffle(to, [0] * to.lanes)

    def mask(self, first: int = 0) -> Value:
        """Which lanes are below the number, of lanes that count from `first`."""
        return self.astype("i32").splat() > self.code.arange(first)

    def lane(self, at: int) -> Value:
        return self.made(f"extractelement {self.typed}, i64 {at}", lanes=0)

    def put(self, at: int, number: Value) -> Value:
        """The vector with another number in a lane."""
        return self.made(f"insertelement {self.typed}, {number.typed}, i64 {at}")

    def shuffle(self, other: Value, order: Sequence[int]) -> Value:
        """Lanes of both in some order."""
        listed = "<" + ", ".join(f"i32 {at}" for at in order) + ">"
        places = f"<{len(order)} x i32> {listed if any(order) else 'zeroinitializer'}"
        return self.made(f"shufflevector {self.typed}, {other.typed}, {places}", lanes=len(order))

    def max(self) -> Value:
        return self.code.own(f"vector.reduce.fmax.{self.suffix}", [self], self.of, 0, "nnan ")

    def sum(self, onto: Number = 0.0) -> Value:
        """The sum of all lanes, in any order."""
        given = [self.code.value(onto, self.of), self]
        return self.code.own(f"vector.reduce.fadd.{self.suffix}", given, self.of, 0, "reassoc ")


Number = Value | int | float
Integer = Value
Truth = Value
Float = Value


class Pointer(Value):
    """Where values of the type `to` lie; numbers are added in units of these.

    Where it is aligned, vectors begin at multiples of their size.
    """

    __slots__ = ("aligned", "to")

    def __init__(self, code: Code, text: str, to: str, aligned: bool) -> None:
        super().__init__(code, text, "ptr")
        self.to, self.aligned = to, aligned

    def __add__(self, count: Number) -> Pointer:
        count = self.code.value(count)
        text = self.made(f"getelementptr {self.to}, {self.typed}, {count.typed}").text
        return Pointer(self.code, text, self.to, self.aligned)

    def view(self, of: str, how: str = "") -> Pointer:
        """The same place, where values of another type lie."""
        return Pointer(self.code, self.text, of, self.aligned)

    def __getitem__(self, at: Number) -> Value:
        return (self + at).load(lanes=0)

    def __setitem__(self, at: Number, number: Number) -> None:
        (self + at).store(self.code.value(number, self.to))

    def load(self, mask: Value | None = None, lanes: int | None = None) -> Value:
        """A vector, of which lanes are 0 that a mask leaves out, or with no lanes a number."""
        loaded = Value(self.code, "", self.to, self.code.lanes if lanes is None else lanes)
        if mask is None:
            return loaded.made(f"load {loaded.type}, {self.typed}, align {self._align(loaded)}")
        given = [self, self.code.value(4, "i32"), mask, loaded.like(0.0)]
        return self.code.own(f"masked.load.{loaded.suffix}.p0", given, loaded.of, loaded.lanes)

    def store(self, value: Value, mask: Value | None = None) -> None:
        """Put a number or vector here, or those of its lanes that a mask names.

        Raises:
            TypeError: numbers of another type lie here, which may be shorter.
        """
        if value.of != self.to:
            raise TypeError(f"a value of {value.of} is stored where {self.to} lies")
        if mask is None:
            self.code.line(f"store {value.typed}, {self.typed}, align {self._align(value)}")
        else:
            given = [value, self, self.code.value(4, "i32"), mask]
            self.code.own(f"masked.store.{value.suffix}.p0", given)

    def gather(self, at: Value) -> Value:
        """A vector of the numbers here at other places than one after the other."""
        places = f"getelementptr {self.to}, {self.typed}, {at.view('i64', 'sext').typed}"
        given = [self.made(places, lanes=at.lanes), self.code.value(4, "i32")]
        given += [self.code.value(1, "i1", at.lanes), Value(self.code, "poison", self.to, at.lanes)]
        name = f"masked.gather.{given[-1].suffix}.v{at.lanes}p0"
        return self.code.own(name, given, self.to, at.lanes)

    def _align(self, value: Value) -> int:
        return 4 * self.code.lanes if self.aligned and value.lanes else BYTES.get(self.to, 8)

    def atomic(self, how: str, number: int) -> Value:
        """Add a number to the one here ("add"), or subtract it ("sub"); returns the former one."""
        operand = self.code.value(number, self.to)
        return operand.made(f"atomicrmw {how} {self.typed}, {operand.typed} seq_cst")

    def load_atomic(self) -> Value:
        here = Value(self.code, "", self.to)
        return here.made(f"load atomic {self.to}, {self.typed} seq_cst, align {BYTES[self.to]}")

    def store_atomic(self, number: Value) -> None:
        to = f"{self.typed} seq_cst, align {BYTES[self.to]}"
        self.code.line(f"store atomic {number.typed}, {to}")

    def prefetch(self, locality: int = 2) -> None:
        given = [self, *(self.code.value(option, "i32") for option in (0, locality, 1))]
        self.code.own("prefetch.p0", given)


Aligned = Pointer


class Variable:
    """A value that a loop or a branch changes: `now` is the latest."""

    def __init__(self, now: Value) -> None:
        self.now = now


class Code:
    """The text of a function and of those that it calls, with vectors of so many float32."""

    def __init__(self, lanes: int = 0) -> None:
        self.lanes = lanes
        self._lines: list[str] = []
        self._names, self._block, self._whole = 0, "", 0
        self._declared: dict[str, None] = {}
        self._called: dict[Any, str] = {}  # names by functions and their settings

    def text(self, function: Callable[..., None], **settings: Any) -> str:
        """The text of a function, which it defines first; settings are values of Python."""
        self._called_name(function, settings)
        written = 0
        while written < len(self._called):
            self._define(written)
            written += 1
        return "\n".join([*self._lines, *self._declared])

    def _define(self, at: int) -> None:
        (function, settings), name = list(self._called.items())[at]
        self._names = 0
        given, leaves = list[Any](), list[Value]()
        for make, kinds in _parameters(function):
            values = [self._parameter(*each) for each in kinds]
            given.append(make(values))
            leaves += values
        typed = ", ".join(value.typed for value in leaves)
        self._lines.append(f"define {'internal ' * bool(at)}void @{name}({typed}) {{")
        self._begin("begin")
        function(self, *given, **dict(settings))
        self._lines.append("  ret void\n}")

    def _parameter(self, name: str, kind: str) -> Value:
        if PARAMETERS[kind] == "ptr":
            return Pointer(self, f"%{name}", "float", kind == "Aligned")
        return Value(self, f"%{name}", PARAMETERS[kind])

    def _called_name(self, function: Callable[..., None], settings: dict[str, Any]) -> str:
        key = function, tuple(settings.items())
        return self._called.setdefault(key, f"{function.__name__}{len(self._called)}")

    def call(
        self, function: Callable[..., None], *given: Number | tuple[Number, ...], **settings: Any
    ) -> None:
        """Call a function, which is written once for each of its settings.

        Raises:
            TypeError: a value is not of the type that the function takes; LLVM does not compare.
        """
        listed = (each if isinstance(each, tuple) else (each,) for each in given)
        numbers = list(chain.from_iterable(listed))
        kinds = [kind for _, parts in _parameters(function) for _, kind in parts]
        values = []
        for number, kind in zip(numbers, kinds, strict=True):
            value = self.value(number, PARAMETERS[kind])
            aligned = kind != "Aligned" or (isinstance(value, Pointer) and value.aligned)
            if value.type != PARAMETERS[kind] or not aligned:
                raise TypeError(f"{function.__name__} takes {kind}, and is given {value.typed}")
            values.append(value.typed)
        self.line(f"call void @{self._called_name(function, settings)}({', '.join(values)})")

    def own(
        self, name: str, given: Sequence[Value], of: str = "void", lanes: int = 0, how: str = ""
    ) -> Value:
        """Call one of LLVM's own functions."""
        to = Value(self, "", of, lanes)
        typed, types = (
            ", ".join(getattr(value, part) for value in given) for part in ("typed", "type")
        )
        self._declared[f"declare {to.type} @llvm.{name}({types})"] = None
        call = f"call {how}{to.type} @llvm.{name}({typed})"
        if of != "void":
            return to.made(call)
        self.line(call)
        return to

    def line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def value(self, number: Number, of: str = "i64", lanes: int = 0) -> Value:
        """A number of Python as a constant."""
        if isinstance(number, Value):
            return number
        text = hexadecimal(number) if of in FLOATS else str(number)
        return Value(self, f"splat ({of} {text})" if lanes else text, of, lanes)

    def zeros(self) -> Value:
        """A vector of float32."""
        return self.value(0.0, "float", self.lanes)

    def arange(self, first: int = 0) -> Value:
        """A vector of integers that count."""
        places = ", ".join(f"i32 {first + lane}" for lane in range(self.lanes))
        return Value(self, f"<{places}>", "i32", self.lanes)

    @contextmanager
    def loop(
        self, start: Number, stop: Number, step: int = 1, change: Iterable[Variable] = ()
    ) -> Iterator[Value]:
        """Numbers from start on by steps, while they are below stop; the first is not compared."""
        at = Variable(self.value(start))
        with self._repeated([at, *change]) as (head, end):
            yield at.now
            at.now = at.now + step
            self.line(f"br i1 {(at.now < stop).text}, label %{head}, label %{end}")

    @contextmanager
    def endless(self, change: Sequence[Variable] = ()) -> Iterator[Callable[[Value], None]]:
        """Repeat until a condition holds with which the function that it gives is called, once."""
        left = list[Value]()
        with self._repeated(change) as (head, end):

            def leave(condition: Value) -> None:
                left.extend(variable.now for variable in change)
                further = self.name("l")
                self.line(f"br i1 {condition.text}, label %{end}, label %{further}")
                self._begin(further)

            yield leave
            self.line(f"br label %{head}")
        for variable, value in zip(change, left, strict=True):
            variable.now = value

    @contextmanager
    def _repeated(self, change: Sequence[Variable]) -> Iterator[tuple[str, str]]:
        """The label of a block, whose last line is still to be written, and that of the next."""
        head, end, before = self.name("l"), self.name("l"), self._block
        starts = [variable.now for variable in change]
        self.line(f"br label %{head}")
        self._begin(head)
        first = len(self._lines)
        for variable in change:  # lines that are whole when its next value is known
            variable.now = variable.now.made(f"phi {variable.now.typed}")
        self._whole = len(self._lines)
        yield head, end
        for at, (start, variable) in enumerate(zip(starts, change, strict=True), first):
            name = self._lines[at].split(" = ")[0]
            values = f"[{start.text}, %{before}], [{variable.now.text}, %{self._block}]"
            self._lines[at] = f"{name} = phi {start.type} {values}"
        self._begin(end)

    def either(self, condition: Value, change: Sequence[Variable] = ()) -> Iterator[bool]:
        """True, to write the code that runs where a condition holds; then False, for the other."""
        yes, no = self.name("l"), self.name("l")
        self.line(f"br i1 {condition.text}, label %{yes}, label %{no}")
        return self._ways({yes: True, no: False}, change)

    @contextmanager
    def when(self, condition: Value, change: Sequence[Variable] = ()) -> Iterator[None]:
        """Code that runs where a condition holds."""
        for holds in self.either(condition, change):
            if holds:
                yield

    def cases(self, number: Value, numbers: Iterable[int]) -> Iterator[int]:
        """Each of some numbers, to write the code for it; the last one's is for all others too."""
        ways = {self.name("l"): case for case in numbers}
        *listed, last = (f"i64 {case}, label %{label}" for label, case in ways.items())
        self.line(f"switch {number.typed}, {last.split(', ')[1]} [{' '.join(listed)}]")
        return self._ways(ways)

    def _ways(self, ways: dict[str, Any], change: Sequence[Variable] = ()) -> Iterator[Any]:
        end, before = self.name("l"), [variable.now for variable in change]
        values: list[list[str]] = [[] for _ in change]
        for label, way in ways.items():
            self._begin(label)
            for variable, value in zip(change, before, strict=True):
                variable.now = value
            yield way
            for variable, listed in zip(change, values, strict=True):
                listed.append(f"[{variable.now.text}, %{self._block}]")
            self.line(f"br label %{end}")
        self._begin(end)
        for variable, listed in zip(change, values, strict=True):
            variable.now = variable.now.made(f"phi {variable.now.type} {', '.join(listed)}")

    def _begin(self, label: str) -> None:
        """A block; the lines of the former become one text, which takes less memory."""
        self._lines[self._whole :] = ["\n".join([*self._lines[self._whole :], f"{label}:"])]
        self._whole, self._block = len(self._lines), label


def _parameters(function: Any) -> Iterator[tuple[Callable[[list[Value]], Any], list[Any]]]:
    """Each that a function takes besides the code: what makes it, of which names and types.

    Types are read by their names: the function's module imports annotations from `__future__`.
    """
    for name in function.__code__.co_varnames[1 : function.__code__.co_argcount]:
        kind = function.__annotations__[name]
        if kind in PARAMETERS:
            yield (lambda values: values[0]), [(name, kind)]
        else:  # a named tuple of values
            of = function.__globals__[kind]
            kinds = of.__annotations__.items()
            yield of._make, [(f"{name}_{each}", type_of.__forward_arg__) for each, type_of in kinds]


def fields(given: Pointer, names: Sequence[str], addresses: Iterable[str]) -> SimpleNamespace:
    """Values that lie one after the other, 8 bytes each: addresses, and integers."""
    named = SimpleNamespace()
    for at, name in enumerate(names):
        is_address = name in addresses
        value = given.view("ptr" if is_address else "i64")[at]
        setattr(named, name, value.pointer() if is_address else value)
    return named


def fma(first: Value, second: Number, added: Number) -> Value:
    """first * second + added, rounded once."""
    given = [first, first.like(second), first.like(added)]
    return first.code.own(f"fma.{first.suffix}", given, first.of, first.lanes)


def dot_of_pairs(first: Value, second: Value, added: Value) -> Value:
    """first * second + added, where each lane of 32 bits of the first two has two bfloat16."""
    pairs = [
        each.made(f"bitcast {each.typed} to <32 x bfloat>", "bfloat", 32)
        for each in (first, second)
    ]
    return added.code.own("x86.avx512bf16.dpbf16ps.512", [added, *pairs], "float", 16)


def pairs_of(lower: Value, upper: Value) -> Value:
    """Two vectors of float32 rounded to bfloat16, the second in the upper half of each lane."""
    both = lower.shuffle(upper, range(2 * lower.lanes)).astype("bfloat")
    order = [at // 2 + lower.lanes * (at % 2) for at in range(both.lanes)]
    lanes = both.shuffle(both, order)
    return lanes.made(f"bitcast {lanes.typed} to <{lower.lanes} x i32>", "i32", lower.lanes)


def minimum(first: Value, second: Number) -> Value:
    name = "minnum" if first.of in FLOATS else "umin"
    given = [first, first.like(second)]
    return first.code.own(f"{name}.{first.suffix}", given, first.of, first.lanes)


def where(condition: Value, first: Number, second: Number) -> Value:
    """The first where a condition holds, the second elsewhere; one of them may be of Python."""
    like = first if isinstance(first, Value) else second
    assert isinstance(like, Value)
    first, second = like.like(first), like.like(second)
    return like.made(f"select {condition.typed}, {first.typed}, {second.typed}")
