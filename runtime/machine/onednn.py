"""oneDNN: products of matrices, and elementwise functions, by a processor's widest instructions.

Its C API is called on addresses of raw buffers. It multiplies bfloat16, which no BLAS among our
packages does, and uses all cores where MLX's CPU backend computes one value at a time: to scale
packed integers, and for activations. The library comes with the extra `onednn`, or from the system
(Debian's libdnnl3). Its threads are those of OpenMP.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import OrderedDict
from collections.abc import Callable
from ctypes import byref, c_char, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from runtime.core.errors import UsageError

LIBRARY, MAJOR = "libdnnl.so.3", 3
EXTRA = "pip install 'ondevice-tune[onednn]'"
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}

DTYPES = {"uint16": 2, "float32": 3, "int8": 5}  # dnnl_data_type_t; of 16 bits are bfloat16
ACTIVATIONS = {"gelu_tanh": 0x2B, "silu": 0x2C}  # dnnl_alg_kind_t
MULTIPLIED = 0x1FFF1
FOR_GRADIENTS, FOR_RESULTS = 64, 96  # dnnl_prop_kind_t
SOURCE, OTHER, WEIGHTS, TARGET, SCRATCHPAD, SCALES = 1, 2, 33, 17, 80, 4096 | 1  # DNNL_ARG_*
D_SOURCE, D_TARGET = 129, 145
CPU, IN_ORDER, BY_CALLER = 1, 1, 1
QUERY_SCRATCHPAD = 136
ALIGNMENT = 64
# Shapes whose code is kept. The layers of a model have some 30. For bfloat16, code that multiplies
# every shape takes 5 MB a thread to pack factors, where this needs 0.15 MB a shape.
SHAPES = 40
SPINS = "10000"  # some 0.1 ms, after which an idle OpenMP thread leaves its core to others

Array = Any
"""`numpy.ndarray`, which need not be loaded where no product is computed."""
_loaded: list[OneDnn] = []


class _Argument(ctypes.Structure):
    _fields_ = [("index", c_int), ("memory", c_void_p)]


class OneDnn:
    """The loaded library. Arrays are NumPy's, float32 or the bits of bfloat16 values as uint16.

    Only one thread may call it, since all calls share a scratchpad. Results do not depend on the
    number of threads that work.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library, self.threads = library, threads
        library.dnnl_primitive_desc_query_md.restype = c_void_p
        library.dnnl_memory_desc_get_size.restype = c_size_t
        numbers = (c_int * 3).from_address(library.dnnl_version())
        self.version = ".".join(map(str, numbers))
        self._engine, self._stream = c_void_p(), c_void_p()
        check(library.dnnl_engine_create(byref(self._engine), CPU, c_size_t(0)))
        check(library.dnnl_stream_create(byref(self._stream), self._engine, IN_ORDER))
        check(library.dnnl_set_primitive_cache_capacity(0))  # ours is the only one
        self._known: OrderedDict[tuple[object, ...], _Call] = OrderedDict()
        self._scratchpad = ctypes.create_string_buffer(ALIGNMENT)

    def multiply(self, x: Array, w: Array, y: Array, add: bool) -> None:
        """y = x w, or with `add` y += x w, for x (T, C), w (C, R) of one type and float32 y (T, R).

        Rows or columns of x and w must be contiguous, and the rows of y.
        """
        if x.dtype.name == "float32":
            self._multiply_floats(x, w, y, add)
            return
        arrays = {SOURCE: x, WEIGHTS: w, TARGET: y}
        self._run(("multiply", add), arrays, lambda known: self._product(known, add))

    def _multiply_floats(self, x: Array, w: Array, y: Array, add: bool) -> None:
        """The same in float32, by code that multiplies every shape and packs what it reads."""
        (x_order, x_step), (w_order, w_step), (_, y_step) = map(_order, (x, w, y))
        sizes = (c_int64(size) for size in (*y.shape, x.shape[1]))
        check(
            self._library.dnnl_sgemm(
                *(c_char(x_order), c_char(w_order), *sizes, c_float(1)),
                *(c_void_p(address(x)), c_int64(x_step), c_void_p(address(w)), c_int64(w_step)),
                *(c_float(float(add)), c_void_p(address(y)), c_int64(y_step)),
            )
        )

    def convert(self, source: Array, target: Array) -> None:
        """Float32 values (T, C) to those of another array, in bfloat16 to the nearest."""
        self._run(("convert",), {SOURCE: source, TARGET: target}, self._reorder)

    def scale(self, codes: Array, scales: Array, target: Array) -> None:
        """Int8 codes (R, G, n) times float32 scales (R * G,), all contiguous, as (R, G, n)."""
        self._run(("scale",), {SOURCE: codes, TARGET: target, SCALES: scales}, self._reorder)

    def activate(self, activation: str, x: Array, y: Array) -> None:
        """y = f(x) for float32 arrays of one shape (N,)."""

        def describe(known: dict[int, c_void_p]) -> c_void_p:
            return self._activation(activation, FOR_RESULTS, known[SOURCE], known[TARGET])

        self._run(("activate", activation), {SOURCE: x, TARGET: y}, describe)

    def slope(self, activation: str, x: Array, dy: Array, dx: Array) -> None:
        """dx = f'(x) dy for float32 arrays of one shape (N,); dx may be dy."""

        def describe(known: dict[int, c_void_p]) -> c_void_p:
            x, dy, dx = (known[index] for index in (SOURCE, D_TARGET, D_SOURCE))
            forward = self._activation(activation, FOR_GRADIENTS, x, x)
            descriptor, attributes = c_void_p(), self._attributes()
            create = self._library.dnnl_eltwise_backward_primitive_desc_create
            factors = c_float(1), c_float(0)
            kind = ACTIVATIONS[activation]
            given = (dx, dy, x, *factors, forward, attributes)
            check(create(byref(descriptor), self._engine, kind, *given))
            self._library.dnnl_primitive_attr_destroy(attributes)
            self._library.dnnl_primitive_desc_destroy(forward)
            return descriptor

        arrays = {SOURCE: x, D_TARGET: dy, D_SOURCE: dx}
        self._run(("slope", activation), arrays, describe)

    def times(self, x: Array, factor: Array, y: Array) -> None:
        """y = x factor for float32 arrays of one shape (N,), where y may be one of both."""

        def describe(known: dict[int, c_void_p]) -> c_void_p:
            descriptor, attributes = c_void_p(), self._attributes()
            create = self._library.dnnl_binary_primitive_desc_create
            given = (known[SOURCE], known[OTHER], known[TARGET], attributes)
            check(create(byref(descriptor), self._engine, MULTIPLIED, *given))
            self._library.dnnl_primitive_attr_destroy(attributes)
            return descriptor

        self._run(("times",), {SOURCE: x, OTHER: factor, TARGET: y}, describe)

    def _activation(self, activation: str, use: int, x: c_void_p, y: c_void_p) -> c_void_p:
        descriptor, attributes = c_void_p(), self._attributes()
        create = self._library.dnnl_eltwise_forward_primitive_desc_create
        given = (use, ACTIVATIONS[activation], x, y, c_float(1), c_float(0), attributes)
        check(create(byref(descriptor), self._engine, *given))
        self._library.dnnl_primitive_attr_destroy(attributes)
        return descriptor

    def _product(self, described: dict[int, c_void_p], add: bool) -> c_void_p:
        """What multiplies buffers of these descriptions; the caller must destroy it."""
        library = self._library
        sums, attributes, descriptor = c_void_p(), self._attributes(), c_void_p()
        check(library.dnnl_post_ops_create(byref(sums)))
        if add:
            check(library.dnnl_post_ops_append_sum(sums, c_float(1), c_int32(0), c_int(0)))
        check(library.dnnl_primitive_attr_set_post_ops(attributes, sums))
        x, w, y = (described[index] for index in (SOURCE, WEIGHTS, TARGET))
        create = library.dnnl_matmul_primitive_desc_create
        check(create(byref(descriptor), self._engine, x, w, c_void_p(), y, attributes))
        library.dnnl_primitive_attr_destroy(attributes)
        library.dnnl_post_ops_destroy(sums)
        return descriptor

    def _reorder(self, described: dict[int, c_void_p]) -> c_void_p:
        """What converts values, scaled if scales are described."""
        library, engine = self._library, self._engine
        attributes, descriptor = self._attributes(), c_void_p()
        if SCALES in described:
            mask = 0b11  # one for each place in the first two dimensions
            check(library.dnnl_primitive_attr_set_scales_mask(attributes, SOURCE, mask))
        create = library.dnnl_reorder_primitive_desc_create
        source, target = described[SOURCE], described[TARGET]
        check(create(byref(descriptor), source, engine, target, engine, attributes))
        library.dnnl_primitive_attr_destroy(attributes)
        return descriptor

    def _attributes(self) -> c_void_p:
        attributes = c_void_p()
        check(self._library.dnnl_primitive_attr_create(byref(attributes)))
        check(self._library.dnnl_primitive_attr_set_scratchpad_mode(attributes, BY_CALLER))
        return attributes

    def _describe(self, array: Array) -> c_void_p:
        numbers = c_int64 * array.ndim
        strides = (stride // array.itemsize for stride in array.strides)
        described = c_void_p()
        create = self._library.dnnl_memory_desc_create_with_strides
        dtype = DTYPES[array.dtype.name]
        given = (numbers(*array.shape), dtype, numbers(*strides))
        check(create(byref(described), array.ndim, *given))
        return described

    def _run(
        self,
        kind: tuple[object, ...],
        arrays: dict[int, Array],
        describe: Callable[[dict[int, c_void_p]], c_void_p],
    ) -> None:
        """Run the code for arrays of these shapes, which `describe` makes of their descriptions."""
        key = (*kind, *((each.dtype.num, each.shape, each.strides) for each in arrays.values()))
        if key not in self._known:
            described = {index: self._describe(array) for index, array in arrays.items()}
            self._remember(key, describe(described), described)
        self._known.move_to_end(key)
        call = self._known[key]
        places = {index: address(array) for index, array in arrays.items()}
        if call.scratchpad_bytes:
            start = ctypes.addressof(self._scratchpad)
            places[SCRATCHPAD] = -(-start // ALIGNMENT) * ALIGNMENT
        call.run(self._stream, places)

    def _remember(
        self, key: tuple[object, ...], descriptor: c_void_p, described: dict[int, c_void_p]
    ) -> None:
        """Keep the code for a shape, in place of that which was used longest ago."""
        while len(self._known) >= SHAPES:
            self._known.popitem(last=False)[1].destroy()
        call = _Call(self._library, self._engine, descriptor, described)
        self._known[key] = call
        if call.scratchpad_bytes + ALIGNMENT > len(self._scratchpad):
            self._scratchpad = ctypes.create_string_buffer(call.scratchpad_bytes + ALIGNMENT)


class _Call:
    """The code for one shape, and the objects that name its buffers; consumes what describes it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        engine: c_void_p,
        descriptor: c_void_p,
        described: dict[int, c_void_p],
    ) -> None:
        self._library, self._primitive = library, c_void_p()
        check(library.dnnl_primitive_create(byref(self._primitive), descriptor))
        scratchpad = c_void_p(library.dnnl_primitive_desc_query_md(descriptor, QUERY_SCRATCHPAD, 0))
        self.scratchpad_bytes = int(library.dnnl_memory_desc_get_size(scratchpad))
        shapes = dict(described)
        if self.scratchpad_bytes:
            shapes[SCRATCHPAD] = scratchpad
        self._memories: dict[int, c_void_p] = {}
        for index, shape in shapes.items():
            memory = self._memories[index] = c_void_p()
            check(library.dnnl_memory_create(byref(memory), shape, engine, c_void_p()))
        self._arguments = (_Argument * len(shapes))(
            *(_Argument(index, memory) for index, memory in self._memories.items())
        )
        library.dnnl_primitive_desc_destroy(descriptor)
        for shape in described.values():
            library.dnnl_memory_desc_destroy(shape)

    def run(self, stream: c_void_p, addresses: dict[int, int]) -> None:
        library, arguments = self._library, self._arguments
        for index, address in addresses.items():
            check(library.dnnl_memory_set_data_handle(self._memories[index], c_void_p(address)))
        count = len(arguments)
        check(library.dnnl_primitive_execute(self._primitive, stream, count, arguments))

    def destroy(self) -> None:
        for memory in self._memories.values():
            self._library.dnnl_memory_destroy(memory)
        self._library.dnnl_primitive_destroy(self._primitive)


def _order(matrix: Array) -> tuple[bytes, int]:
    """Whether rows of float32 values lie one behind the other or columns do, and how far apart."""
    (rows, columns), (down, across) = matrix.shape, (each // 4 for each in matrix.strides)
    if across == 1 or columns == 1:
        return b"N", max(down if rows > 1 else columns, columns)
    return b"T", max(across, rows)


def address(array: Array) -> int:
    """Where an array's values lie in memory."""
    place: int = array.__array_interface__["data"][0]
    return place


def check(status: int) -> None:
    """Raise RuntimeError if a call of oneDNN has failed."""
    if status:
        raise RuntimeError(f"oneDNN refused a call: {status}")


def load(threads: int, flags: set[str], why: str = "") -> OneDnn:
    """oneDNN with so many threads; loaded once.

    `why` is the option that needs its products of bfloat16, which some processors lack.

    Raises:
        UsageError: it cannot be loaded here, or the processor cannot multiply bfloat16.
    """
    if why and not flags & INSTRUCTIONS and not _elsewhere():
        raise UsageError(
            f"{why}: this processor has no products of bfloat16 (AVX512-BF16 or AMX); give float32"
        )
    if not _loaded:
        if where := _elsewhere():
            raise UsageError(
                f"{why} is built for Linux on x86-64, and this is {where}; give float32"
            )
        # read once, when OpenMP's library is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        library = _open(why)
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
        _loaded.append(OneDnn(library, threads))
    return _loaded[0]


def is_installed() -> bool:
    """Whether oneDNN can be loaded here, which another process tries: this one may not need it."""
    return not _elsewhere() and any(_is_loadable(str(path)) for path in _places() if path.exists())


@cache
def _is_loadable(path: str) -> bool:
    words = [sys.executable, "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", path]
    silent = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    child = os.posix_spawn(sys.executable, words, os.environ, file_actions=silent)
    return os.waitpid(child, 0)[1] == 0


def loaded() -> OneDnn | None:
    """oneDNN, if this process has loaded it."""
    return _loaded[0] if _loaded else None


def share_cores(multiplies: bool) -> None:
    """Leave one thread to OpenBLAS where oneDNN multiplies, else all of them.

    Threads that have nothing to do take a core: both libraries have them wait in busy loops.
    """
    blas = ctypes.CDLL(None)
    if _loaded and hasattr(blas, "openblas_set_num_threads"):
        blas.openblas_set_num_threads(1 if multiplies else _loaded[0].threads)


def _elsewhere() -> str:
    """The system and processor, where the library is not for them; else empty."""
    here = (sys.platform, platform.machine())
    return "" if here == ("linux", "x86_64") else f"{here[0]} on {here[1]}"


def _places() -> list[Path]:
    """Where the extra and Debian install it."""
    import site

    folders = [Path(sys.prefix, "lib"), Path(site.getuserbase(), "lib")]
    return [folder / LIBRARY for folder in (*folders, Path("/usr/lib/x86_64-linux-gnu"))]


def _open(why: str) -> ctypes.CDLL:
    tried = []
    for name in (*map(str, filter(Path.exists, _places())), LIBRARY):
        try:
            library = ctypes.CDLL(name)
        except OSError as problem:
            tried.append(str(problem))
        else:
            library.dnnl_version.restype = c_void_p
            major = c_int.from_address(library.dnnl_version()).value
            if major == MAJOR:
                return library
            tried.append(f"{name} is oneDNN {major}, not {MAJOR}")
    raise UsageError(
        f"{why or 'this plan'} needs oneDNN, which cannot be loaded ({tried[0]}): {EXTRA}"
    )
