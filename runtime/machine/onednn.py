"""oneDNN: products of bfloat16 matrices with float32 results, by a processor's own instructions.

Its C API is called on addresses of raw buffers. MLX's CPU backend multiplies bfloat16 in a plain
loop, and no BLAS among our packages has such a product. The library comes with the extra
`bfloat16`, or from the system (Debian's libdnnl3). Its threads are those of OpenMP.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import OrderedDict
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from itertools import accumulate
from operator import mul
from pathlib import Path

from runtime.core.errors import UsageError

LIBRARY, MAJOR = "libdnnl.so.3", 3
EXTRA = "pip install 'ondevice-tune[bfloat16]'"
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}

BFLOAT16, FLOAT32, INT8 = 2, 3, 5  # dnnl_data_type_t
SOURCE, WEIGHTS, TARGET, SCRATCHPAD, SCALES = 1, 33, 17, 80, 4096 | 1  # DNNL_ARG_*
CPU, IN_ORDER, BY_CALLER = 1, 1, 1
QUERY_SCRATCHPAD = 136
ALIGNMENT = 64
# Shapes whose code is kept. The layers of a model have some 30, and a head four more for each
# number of scored positions. Code that multiplies every shape exists; but it takes 5 MB a thread
# to pack factors, where this needs 0.15 MB a shape.
SHAPES = 40
SPINS = "2000"  # some microseconds, after which an idle OpenMP thread leaves its core to others
SLEEPS_AFTER = "18"  # 2**18 cycles, 0.1 ms, after which an idle thread of OpenBLAS does

_loaded: list[OneDnn] = []


class _Argument(ctypes.Structure):
    _fields_ = [("index", c_int), ("memory", c_void_p)]


class OneDnn:
    """The loaded library. Buffers are given by their addresses, and are contiguous by rows.

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

    def multiply(
        self, x: int, w: int, y: int, shape: tuple[int, int, int], transposed: bool
    ) -> None:
        """y += x w, or x w^T, for bfloat16 x (T, C) and w (C, R), or (R, C), and float32 y (T, R).

        `shape` is (T, C, R).
        """
        key = (shape, transposed)
        if key not in self._known:
            tokens, columns, rows = shape
            strides = (1, columns) if transposed else (rows, 1)
            described = {
                SOURCE: self._describe((tokens, columns), BFLOAT16),
                WEIGHTS: self._describe((columns, rows), BFLOAT16, strides),
                TARGET: self._describe((tokens, rows), FLOAT32),
            }
            self._remember(key, self._product(described), described)
        self._run(key, {SOURCE: x, WEIGHTS: w, TARGET: y})

    def round(
        self,
        source: int,
        target: int,
        shape: tuple[int, int],
        strides: tuple[int, int],
        width: int,
    ) -> None:
        """Float32 values (T, C) that lie `strides` values apart, to the nearest in bfloat16.

        A row of the target has `width` values, of which these are the first.
        """
        key = ("round", shape, strides, width)
        if key not in self._known:
            described = {
                SOURCE: self._describe(shape, FLOAT32, strides),
                TARGET: self._describe(shape, BFLOAT16, (width, 1)),
            }
            self._remember(key, self._reorder(described), described)
        self._run(key, {SOURCE: source, TARGET: target})

    def scale(
        self, codes: int, scales: int, target: int, shape: tuple[int, int, int], width: int
    ) -> None:
        """Int8 codes (R, G, n) times float32 scales (R, G), rounded to the nearest in bfloat16.

        A row of the target has `width` values, of which these are the first.
        """
        key = ("scale", shape, width)
        if key not in self._known:
            rows, groups, values = shape
            described = {
                SOURCE: self._describe(shape, INT8),
                TARGET: self._describe(shape, BFLOAT16, (width, values, 1)),
                SCALES: self._describe((rows * groups,), FLOAT32),
            }
            self._remember(key, self._reorder(described), described)
        self._run(key, {SOURCE: codes, TARGET: target, SCALES: scales})

    def _product(self, described: dict[int, c_void_p]) -> c_void_p:
        """What multiplies buffers of these descriptions; the caller must destroy it."""
        library = self._library
        sums, attributes, descriptor = c_void_p(), self._attributes(), c_void_p()
        check(library.dnnl_post_ops_create(byref(sums)))
        check(library.dnnl_post_ops_append_sum(sums, c_float(1), c_int32(0), c_int(0)))
        check(library.dnnl_primitive_attr_set_post_ops(attributes, sums))
        x, w, y = (described[index] for index in (SOURCE, WEIGHTS, TARGET))
        create = library.dnnl_matmul_primitive_desc_create
        check(create(byref(descriptor), self._engine, x, w, c_void_p(), y, attributes))
        library.dnnl_primitive_attr_destroy(attributes)
        library.dnnl_post_ops_destroy(sums)
        return descriptor

    def _reorder(self, described: dict[int, c_void_p]) -> c_void_p:
        """What converts to bfloat16, scaled if scales are described."""
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

    def _describe(
        self, shape: tuple[int, ...], dtype: int, strides: tuple[int, ...] | None = None
    ) -> c_void_p:
        """The description of a buffer, contiguous by rows unless strides are given."""
        if strides is None:
            strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
        numbers = c_int64 * len(shape)
        described = c_void_p()
        create = self._library.dnnl_memory_desc_create_with_strides
        check(create(byref(described), len(shape), numbers(*shape), dtype, numbers(*strides)))
        return described

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

    def _run(self, key: tuple[object, ...], addresses: dict[int, int]) -> None:
        self._known.move_to_end(key)
        call = self._known[key]
        if call.scratchpad_bytes:
            start = ctypes.addressof(self._scratchpad)
            addresses[SCRATCHPAD] = -(-start // ALIGNMENT) * ALIGNMENT
        call.run(self._stream, addresses)


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


def check(status: int) -> None:
    """Raise RuntimeError if a call of oneDNN has failed."""
    if status:
        raise RuntimeError(f"oneDNN refused a product, or a conversion to bfloat16: {status}")


def load(threads: int, flags: set[str]) -> OneDnn:
    """oneDNN with so many threads, on a processor with these instructions; loaded once.

    Raises:
        UsageError: the processor cannot multiply bfloat16, or the library is not installed.
    """
    if not _loaded:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            where = f"{sys.platform} on {platform.machine()}"
            raise UsageError(
                f"--compute-dtype bfloat16 is built for Linux on x86-64, and this is {where}; "
                "give float32"
            )
        if not flags & INSTRUCTIONS:
            raise UsageError(
                "--compute-dtype bfloat16: this processor has no products of bfloat16 "
                "(AVX512-BF16 or AMX); give float32"
            )
        # read once, when OpenMP's library is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        library = _open()
        _let_blas_threads_sleep()
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
        _loaded.append(OneDnn(library, threads))
    return _loaded[0]


def loaded() -> OneDnn | None:
    """oneDNN, if this process has loaded it."""
    return _loaded[0] if _loaded else None


def _open() -> ctypes.CDLL:
    import site

    places = [Path(base, "lib", LIBRARY) for base in (sys.prefix, site.getuserbase())]
    tried = []
    for name in (*map(str, filter(Path.exists, places)), LIBRARY):
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
        f"--compute-dtype bfloat16 needs oneDNN, which cannot be loaded ({tried[0]}): "
        f"{EXTRA}, or give float32"
    )


def _let_blas_threads_sleep() -> None:
    """Have idle threads of OpenBLAS sleep, else they take the core of one of OpenMP's.

    OpenBLAS reads the variable when it is loaded. Here it reads it once more, and starts its
    threads anew with its next product.
    """
    blas = ctypes.CDLL(None)
    functions = ("openblas_read_env", "blas_thread_shutdown_")
    if not all(hasattr(blas, name) for name in functions):
        return  # threads that spin cost time, and nothing else
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", SLEEPS_AFTER)
    threads = int(blas.openblas_get_num_threads())
    blas.openblas_read_env()
    blas.blas_thread_shutdown_()
    blas.openblas_set_num_threads(threads)
