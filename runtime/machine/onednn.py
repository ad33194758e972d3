"""oneDNN: products in bfloat16, which no BLAS among our packages multiplies.

Its C API is called on addresses of raw buffers. The library comes with the extra `onednn`, or from
the system (Debian's libdnnl3). Its threads are those of OpenMP.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import OrderedDict
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from runtime.core.errors import UsageError

OPTION = "--compute-dtype bfloat16"
LIBRARY, MAJOR = "libdnnl.so.3", 3
EXTRA = "pip install 'ondevice-tune[onednn]'"
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}

DTYPES = {"uint16": 2, "float32": 3, "int8": 5}  # dnnl_data_type_t; of 16 bits are bfloat16
SOURCE, WEIGHTS, TARGET, SCRATCHPAD, SCALES = 1, 33, 17, 80, 4096 | 1  # DNNL_ARG_*
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
        """y = x w, or with `add` y += x w, of bfloat16 x (T, C), w (C, R) and float32 y (T, R).

        Rows or columns of x and w must be contiguous, and the rows of y.
        """
        arrays = {SOURCE: x, WEIGHTS: w, TARGET: y}
        self._run(("multiply", add), arrays, lambda known: self._product(known, add))

    def convert(self, source: Array, target: Array) -> None:
        """Float32 values (T, C) to the nearest of bfloat16, in another array."""
        self._run(("convert",), {SOURCE: source, TARGET: target}, self._reorder)

    def scale(self, codes: Array, scales: Array, target: Array) -> None:
        """Int8 codes (R, G, n) times float32 scales (R * G,), all contiguous, as bfloat16."""
        self._run(("scale",), {SOURCE: codes, TARGET: target, SCALES: scales}, self._reorder)

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


def address(array: Array) -> int:
    """Where an array's values lie in memory."""
    place: int = array.__array_interface__["data"][0]
    return place


def check(status: int) -> None:
    """Raise RuntimeError if a call of oneDNN has failed."""
    if status:
        raise RuntimeError(f"oneDNN refused a call: {status}")


def load(threads: int, flags: set[str]) -> OneDnn:
    """oneDNN with so many threads; loaded once.

    Raises:
        UsageError: it cannot be loaded here, or the processor cannot multiply bfloat16.
    """
    if where := _elsewhere():
        raise UsageError(
            f"{OPTION} is built for Linux on x86-64, and this is {where}; give float32"
        )
    if not flags & INSTRUCTIONS:
        raise UsageError(
            f"{OPTION}: this processor has no products of bfloat16 (AVX512-BF16 or AMX); give "
            "float32"
        )
    if not _loaded:
        # read once, when OpenMP's library is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        library = _open()
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
        _loaded.append(OneDnn(library, threads))
    return _loaded[0]


def loaded() -> OneDnn | None:
    """oneDNN, if this process has loaded it."""
    return _loaded[0] if _loaded else None


def _elsewhere() -> str:
    """The system and processor, where the library is not for them; else empty."""
    here = (sys.platform, platform.machine())
    return "" if here == ("linux", "x86_64") else f"{here[0]} on {here[1]}"


def _places() -> list[Path]:
    """Where the extra and Debian install it."""
    import site

    folders = [Path(sys.prefix, "lib"), Path(site.getuserbase(), "lib")]
    return [folder / LIBRARY for folder in (*folders, Path("/usr/lib/x86_64-linux-gnu"))]


def _open() -> ctypes.CDLL:
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
    raise UsageError(f"{OPTION} needs oneDNN, which cannot be loaded ({tried[0]}): {EXTRA}")
