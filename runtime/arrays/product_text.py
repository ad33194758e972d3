"""The text of a product with a quantized tile, in LLVM's language.

`runtime.arrays.compiled_products` says how it goes, and runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from runtime.arrays.compiled_dequantize import HALVES, READ, UNPACK

F32 = 4
Names = dict[str, str | int]

DEPTH = 128  # of the inner dimension at a time: a multiple of every group
JOB = (
    *("next", "words", "scales", "biases", "x", "y", "tokens", "x_step", "y_step", "columns"),
    *("depth", "groups", "adds", "rank", "u", "b", "b_row", "b_column", "block"),
)
ADDRESSES, OF_TOKENS = (*JOB[1:6], "u", "b"), ("x", "y", "u", "tokens")
"""What a product takes, each 8 bytes: addresses, and counts of values or groups.

`next` counts the parts of the result that threads have taken. `x_step`, `y_step` and `groups` are
from one row to the next; `columns` are those of y, `depth` those of x. A product u b of some rank
is added, with u (tokens, rank); `b_row` and `b_column` are from one of its rows or columns to the
next. A part has as many tokens as a `block`.
"""


@dataclass(frozen=True)
class Registers:
    """The sums that a processor holds in registers: some tokens, for some vectors of columns."""

    lanes: int  # float32 values of a vector
    vectors: int
    tokens: int
    strips: int = 1  # of so many columns, that a thread takes at once
    steps: int = 1  # of the inner dimension, in one pass of the loop

    @property
    def width(self) -> int:
        """Columns of the result that are computed at once."""
        return self.lanes * self.vectors

    @property
    def part_width(self) -> int:
        """Columns of a part of the result."""
        return self.width * self.strips


WIDE, NARROW = Registers(16, 4, 6), Registers(8, 2, 6, 4, 4)  # AVX-512, AVX2

PRODUCT = """
declare i64 @llvm.umin.i64(i64, i64)
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
declare {vector} @llvm.masked.load.v{lanes}f32.p0(ptr, i32, {mask}, {vector})
declare void @llvm.masked.store.v{lanes}f32.p0({vector}, ptr, i32, {mask})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare {whole} @llvm.masked.gather.v{lanes}i32.v{lanes}p0({pointers}, i32, {mask}, {whole})
define void @product(ptr %job, ptr %panel) {{
begin:
{fields}
  %adding = icmp ne i64 %adds, 0
  %before_block = sub i64 %block, 1
  %rounded = add i64 %all_tokens, %before_block
  %blocks = udiv i64 %rounded, %block
  br label %part
part:
  %number = atomicrmw add ptr %job, i64 1 seq_cst
  %column_part = udiv i64 %number, %blocks
  %part_first = mul i64 %column_part, {part_width}
  %some = icmp ult i64 %part_first, %columns
  br i1 %some, label %begins, label %end
begins:
  %left = sub i64 %columns, %part_first
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {part_width})
  %block_part = urem i64 %number, %blocks
  %first_token = mul i64 %block_part, %block
  %further_tokens = sub i64 %all_tokens, %first_token
  %tokens = call i64 @llvm.umin.i64(i64 %further_tokens, i64 %block)
  %x_before = mul i64 %first_token, %x_step
  %x = getelementptr float, ptr %all_x, i64 %x_before
  %y_before = mul i64 %first_token, %y_step
  %y = getelementptr float, ptr %all_y, i64 %y_before
  %y_part = getelementptr float, ptr %y, i64 %part_first
  %u_before = mul i64 %first_token, %rank
  %u = getelementptr float, ptr %all_u, i64 %u_before
  br label %inner
inner:
  %k = phi i64 [0, %begins], [%next_k, %multiply]
  %rest = sub i64 %depth, %k
  %deep = call i64 @llvm.umin.i64(i64 %rest, i64 {depth})
  br label %strip
strip:
  %c = phi i64 [0, %inner], [%next_c, %strip]
  %p_before = mul i64 %c, {depth}
  %p = getelementptr float, ptr %panel, i64 %p_before
  %first = add i64 %part_first, %c
  call void @dequantize(ptr %words, ptr %scales, ptr %biases, i64 %groups, i64 %columns, i64 %first, i64 %k, i64 %deep, ptr %p)
  %next_c = add i64 %c, {width}
  %more_strips = icmp ult i64 %next_c, %here
  br i1 %more_strips, label %strip, label %multiply
multiply:
  %x_k = getelementptr float, ptr %x, i64 %k
  %later = icmp ne i64 %k, 0
  %sums = or i1 %later, %adding
  call void @tokens(i64 %tokens, ptr %x_k, i64 %x_step, ptr %panel, i64 %deep, ptr %y_part, i64 %y_step, i64 %here, i1 %sums)
  %next_k = add i64 %k, %deep
  %more = icmp ult i64 %next_k, %depth
  br i1 %more, label %inner, label %further
further:
  %adapted = icmp ne i64 %rank, 0
  br i1 %adapted, label %rows, label %part
rows:
  %d = phi i64 [0, %further], [%next_d, %next]
  %b_before = mul i64 %d, %b_row
  %b_d = getelementptr float, ptr %b, i64 %b_before
  br label %value
value:
  %e = phi i64 [0, %rows], [%next_e, %value]
  %column = add i64 %part_first, %e
  %across = mul i64 %column, %b_column
  %b_at = getelementptr float, ptr %b_d, i64 %across
  %one = load float, ptr %b_at
  %e_strip = udiv i64 %e, {width}
  %e_within = urem i64 %e, {width}
  %p_at = getelementptr [{depth} x [{width} x float]], ptr %panel, i64 %e_strip, i64 %d, i64 %e_within
  store float %one, ptr %p_at
  %next_e = add i64 %e, 1
  %more_columns = icmp ult i64 %next_e, %here
  br i1 %more_columns, label %value, label %next
next:
  %next_d = add i64 %d, 1
  %more_rows = icmp ult i64 %next_d, %rank
  br i1 %more_rows, label %rows, label %add
add:
  call void @tokens(i64 %tokens, ptr %u, i64 %rank, ptr %panel, i64 %rank, ptr %y_part, i64 %y_step, i64 %here, i1 true)
  br label %part
end:
  ret void
}}
define internal void @tokens(i64 %tokens, ptr %x, i64 %x_step, ptr %panel, i64 %deep, ptr %y, i64 %y_step, i64 %here, i1 %sums) {{
begin:
  %x_most = mul i64 %x_step, {most}
  br label %look
look:
  %t = phi i64 [0, %begin], [%next_t, %done]
  %rest = sub i64 %tokens, %t
  %x_before = mul i64 %t, %x_step
  %x_t = getelementptr float, ptr %x, i64 %x_before
  %y_before = mul i64 %t, %y_step
  %y_t = getelementptr float, ptr %y, i64 %y_before
  %some = icmp ne i64 %rest, 0
  br i1 %some, label %soon, label %end
soon:
  %x_soon = getelementptr float, ptr %x_t, i64 %x_most
  br label %line
line:
  %l = phi i64 [0, %soon], [%next_l, %line]
  %x_before{i} = mul i64 %x_step, {i}
  %x_soon{i} = getelementptr float, ptr %x_soon, i64 %x_before{i}
  %x_line{i} = getelementptr float, ptr %x_soon{i}, i64 %l
  call void @llvm.prefetch.p0(ptr %x_line{i}, i32 0, i32 2, i32 1)
  %next_l = add i64 %l, 16
  %more_lines = icmp ult i64 %next_l, %deep
  br i1 %more_lines, label %line, label %strip
strip:
  %c = phi i64 [0, %line], [%next_c, %again]
  %p_before = mul i64 %c, {depth}
  %p_c = getelementptr float, ptr %panel, i64 %p_before
  %y_c = getelementptr float, ptr %y_t, i64 %c
  %left = sub i64 %here, %c
  switch i64 %rest, label %few{most} [{cases}]
{calls}
again:
  %next_c = add i64 %c, {width}
  %more_strips = icmp ult i64 %next_c, %here
  br i1 %more_strips, label %strip, label %done
done:
  %taken = call i64 @llvm.umin.i64(i64 %rest, i64 {most})
  %next_t = add i64 %t, %taken
  br label %look
end:
  ret void
}}
"""  # noqa: E501
GIVEN = "ptr %x_t, i64 %x_step, ptr %p_c, i64 %deep, ptr %y_c, i64 %y_step, i64 %left, i1 %sums"
# y[i] += x[i] P for some tokens i, every sum in a register. A line with {i}, {v} or {u} stands
# there once for each of them. With AVX2 masked stores are slow, so whole vectors have others.
FEW = """define internal void @few{count}({given}) {{
begin:
  %narrow = trunc i64 %left to i32
  %narrow_one = insertelement {whole} poison, i32 %narrow, i64 0
  %narrow_all = shufflevector {whole} %narrow_one, {whole} poison, {whole} zeroinitializer
  %sums_one = insertelement {mask} poison, i1 %sums, i64 0
  %sums_all = shufflevector {mask} %sums_one, {mask} poison, {whole} zeroinitializer
  %stored{v} = icmp ugt {whole} %narrow_all, <{places}>
  %loaded{v} = and {mask} %stored{v}, %sums_all
  %x_before{i} = mul i64 %x_step, {i}
  %x{i} = getelementptr float, ptr %x_t, i64 %x_before{i}
  %y_before{i} = mul i64 %y_step, {i}
  %y{i} = getelementptr float, ptr %y_c, i64 %y_before{i}
  %y{i}_{v} = getelementptr {vector}, ptr %y{i}, i64 {v}
  %stop0 = freeze i64 0
  %full = icmp uge i64 %left, {width}
  br i1 %full, label %vectors, label %masked
vectors:
  br i1 %sums, label %load, label %begun
load:
  %whole{i}_{v} = load {vector}, ptr %y{i}_{v}, align 4
  br label %begun
masked:
  %some{i}_{v} = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %y{i}_{v}, i32 4, {mask} %loaded{v}, {vector} zeroinitializer)
  br label %begun
begun:
  %sum0_{i}_{v} = phi {vector} [zeroinitializer, %vectors], [%whole{i}_{v}, %load], [%some{i}_{v}, %masked]
{loops}
  br i1 %full, label %store, label %part
store:
  store {vector} %sum1_{i}_{v}, ptr %y{i}_{v}, align 4
  ret void
part:
  call void @llvm.masked.store.v{lanes}f32.p0({vector} %sum1_{i}_{v}, ptr %y{i}_{v}, i32 4, {mask} %stored{v})
  ret void
}}
"""  # noqa: E501
# Some steps u of the inner dimension at a time, after those that a loop of more steps has `done`
LOOP = """  br label %from{steps}
from{steps}:
  %left{steps} = sub i64 %deep, %stop{done}
  %rest{steps} = urem i64 %left{steps}, {steps}
  %stop{steps} = sub i64 %deep, %rest{steps}
  %any{steps} = icmp ult i64 %stop{done}, %stop{steps}
  br i1 %any{steps}, label %loop{steps}, label %end{steps}
loop{steps}:
  %d{steps} = phi i64 [%stop{done}, %from{steps}], [%next{steps}, %loop{steps}]
  %z{steps}_{i}_{v}_0 = phi {vector} [%sum{done}_{i}_{v}, %from{steps}], [%z{steps}_{i}_{v}_{steps}, %loop{steps}]
  %p{steps} = getelementptr [{width} x float], ptr %p_c, i64 %d{steps}
  %x{steps}_{i} = getelementptr float, ptr %x{i}, i64 %d{steps}
  %p{steps}_{u} = getelementptr [{width} x float], ptr %p{steps}, i64 {u}
  %p{steps}_{v}_{u} = getelementptr {vector}, ptr %p{steps}_{u}, i64 {v}
  %w{steps}_{v}_{u} = load {vector}, ptr %p{steps}_{v}_{u}, align {aligned}
  %x{steps}_{i}_{u} = getelementptr float, ptr %x{steps}_{i}, i64 {u}
  %one{steps}_{i}_{u} = load float, ptr %x{steps}_{i}_{u}
  %first{steps}_{i}_{u} = insertelement {vector} poison, float %one{steps}_{i}_{u}, i64 0
  %all{steps}_{i}_{u} = shufflevector {vector} %first{steps}_{i}_{u}, {vector} poison, {whole} zeroinitializer
  %z{steps}_{i}_{v}_{u_next} = call {vector} @llvm.fma.v{lanes}f32({vector} %all{steps}_{i}_{u}, {vector} %w{steps}_{v}_{u}, {vector} %z{steps}_{i}_{v}_{u})
  %next{steps} = add i64 %d{steps}, {steps}
  %more{steps} = icmp ult i64 %next{steps}, %stop{steps}
  br i1 %more{steps}, label %loop{steps}, label %end{steps}
end{steps}:
  %sum{steps}_{i}_{v} = phi {vector} [%sum{done}_{i}_{v}, %from{steps}], [%z{steps}_{i}_{v}_{steps}, %loop{steps}]"""  # noqa: E501
# x W: rows k of W, of which columns `first` and on are a row of P.
BY_ROWS = """define internal void @dequantize(ptr %words, ptr %scales, ptr %biases, i64 %groups, i64 %columns, i64 %first, i64 %k, i64 %deep, ptr %panel) {{
begin:
  %left = sub i64 %columns, %first
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {width})
  %block_octets = mul i64 %groups, {block_octets}
  br label %row
row:
  %r = phi i64 [0, %begin], [%next_r, %done]
  %down = add i64 %k, %r
  %before = mul i64 %down, %groups
  %p = getelementptr [{width} x float], ptr %panel, i64 %r
  br label %piece
piece:
  %c = phi i64 [0, %row], [%next_c, %piece]
  %column = add i64 %first, %c
  %g = udiv i64 %column, {size}
  %at = add i64 %before, %g
  %g_first = mul i64 %at, {size}
  %within = urem i64 %column, {size}
  %value = add i64 %g_first, %within
  %octet = udiv i64 %value, {per_octet}
  %octets_at = getelementptr i8, ptr %words, i64 %octet
  %octets = load <{octets} x i8>, ptr %octets_at, align 1
  %soon = getelementptr i8, ptr %octets_at, i64 %block_octets
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 2, i32 1)
{unpack}
  %signed = sub <{piece} x i8> %codes, splat (i8 {middle})
  %integers = sitofp <{piece} x i8> %signed to <{piece} x float>
  %scale_at = getelementptr {half}, ptr %scales, i64 %at
{scale}
  %scale_one = insertelement <{piece} x float> poison, float %scale, i64 0
  %scale_all = shufflevector <{piece} x float> %scale_one, <{piece} x float> poison, <{piece} x i32> zeroinitializer
  %scaled = fmul <{piece} x float> %integers, %scale_all
{shift}
  %p_c = getelementptr float, ptr %p, i64 %c
  store <{piece} x float> %values, ptr %p_c, align {aligned}
  %next_c = add i64 %c, {piece}
  %more = icmp ult i64 %next_c, %here
  br i1 %more, label %piece, label %done
done:
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %deep
  br i1 %again, label %row, label %end
end:
  ret void
}}
"""  # noqa: E501
ROW_SHIFT = """  %bias_at = getelementptr {half}, ptr %biases, i64 %at
{bias}
  %middle = fmul float %scale, {middle}.0
  %shift = fadd float %bias, %middle
  %shift_one = insertelement <{piece} x float> poison, float %shift, i64 0
  %shift_all = shufflevector <{piece} x float> %shift_one, <{piece} x float> poison, <{piece} x i32> zeroinitializer
  %values = fadd <{piece} x float> %scaled, %shift_all"""  # noqa: E501
# x W^T: columns k of W, of which rows `first` and on are a row of P. A vector has one word of each
# of some rows, so its codes are already in the places of P. Rows past the last are the last one.
BY_COLUMNS = """define internal void @dequantize(ptr %words, ptr %scales, ptr %biases, i64 %groups, i64 %columns, i64 %first, i64 %k, i64 %deep, ptr %panel) {{
begin:
  %last = sub i64 %columns, 1
  %groups_narrow = trunc i64 %groups to i32
  %groups_one = insertelement {whole} poison, i32 %groups_narrow, i64 0
  %groups_all = shufflevector {whole} %groups_one, {whole} poison, {whole} zeroinitializer
  %last_narrow = trunc i64 %last to i32
  %last_one = insertelement {whole} poison, i32 %last_narrow, i64 0
  %last_all = shufflevector {whole} %last_one, {whole} poison, {whole} zeroinitializer
  %g_first = udiv i64 %k, {size}
  %k_end = add i64 %k, %deep
  %g_end = udiv i64 %k_end, {size}
  br label %rows
rows:
  %v = phi i64 [0, %begin], [%next_v, %done]
  %v_before = mul i64 %v, {lanes}
  %v_first = add i64 %first, %v_before
  %v_narrow = trunc i64 %v_first to i32
  %v_one = insertelement {whole} poison, i32 %v_narrow, i64 0
  %v_all = shufflevector {whole} %v_one, {whole} poison, {whole} zeroinitializer
  %counted = add {whole} %v_all, <{places}>
  %past = icmp ugt {whole} %counted, %last_all
  %row = select {mask} %past, {whole} %last_all, {whole} %counted
  %before = mul {whole} %row, %groups_all
  %p_v = getelementptr {vector}, ptr %panel, i64 %v
  br label %group
group:
  %g = phi i64 [%g_first, %rows], [%next_g, %next]
  %g_narrow = trunc i64 %g to i32
  %g_one = insertelement {whole} poison, i32 %g_narrow, i64 0
  %g_all = shufflevector {whole} %g_one, {whole} poison, {whole} zeroinitializer
  %at = add {whole} %before, %g_all
  %at{l}_narrow = extractelement {whole} %at, i64 {l}
  %at{l} = zext i32 %at{l}_narrow to i64
  %scale_at{l} = getelementptr {half}, ptr %scales, i64 %at{l}
  %scale{l} = load {half}, ptr %scale_at{l}
  %octet{l} = mul i64 %at{l}, {group_octets}
  %octets_at{l} = getelementptr i8, ptr %words, i64 %octet{l}
  %soon{l} = getelementptr i8, ptr %octets_at{l}, i64 {block_octets}
  call void @llvm.prefetch.p0(ptr %soon{l}, i32 0, i32 2, i32 1)
  %scales0 = freeze {halves} zeroinitializer
  %scales{l_next} = insertelement {halves} %scales{l}, {half} %scale{l}, i64 {l}
{scale}
{shift}
  %words_at = mul {whole} %at, splat (i32 {group_words})
  %g_columns = mul i64 %g, {size}
  %p_column = sub i64 %g_columns, %k
  br label %word
word:
  %q = phi i64 [0, %group], [%next_q, %word]
  %q_narrow = trunc i64 %q to i32
  %q_one = insertelement {whole} poison, i32 %q_narrow, i64 0
  %q_all = shufflevector {whole} %q_one, {whole} poison, {whole} zeroinitializer
  %word_at = add {whole} %words_at, %q_all
  %word_wide = sext {whole} %word_at to <{lanes} x i64>
  %word_places = getelementptr i32, ptr %words, <{lanes} x i64> %word_wide
  %gathered = call {whole} @llvm.masked.gather.v{lanes}i32.v{lanes}p0({pointers} %word_places, i32 4, {mask} splat (i1 true), {whole} poison)
  %q_columns = mul i64 %q, {word_codes}
  %p_q = add i64 %p_column, %q_columns
  %moved{j} = lshr {whole} %gathered, splat (i32 {moved})
  %code{j} = and {whole} %moved{j}, splat (i32 {most})
  %signed{j} = sub {whole} %code{j}, splat (i32 {middle})
  %integers{j} = sitofp {whole} %signed{j} to {vector}
  %scaled{j} = fmul {vector} %integers{j}, %scale
{shifted}
  %p_j{j} = add i64 %p_q, {j}
  %p_row{j} = getelementptr [{width} x float], ptr %p_v, i64 %p_j{j}
  store {vector} %values{j}, ptr %p_row{j}, align {aligned}
  %next_q = add i64 %q, 1
  %more_words = icmp ult i64 %next_q, {group_words}
  br i1 %more_words, label %word, label %next
next:
  %next_g = add i64 %g, 1
  %more_groups = icmp ult i64 %next_g, %g_end
  br i1 %more_groups, label %group, label %done
done:
  %next_v = add i64 %v, 1
  %more = icmp ult i64 %next_v, {vectors}
  br i1 %more, label %rows, label %end
end:
  ret void
}}
"""  # noqa: E501
WIDER = {
    "float": "  %{name} = freeze {vector} %{name}s{lanes}",
    "half": "  %{name} = fpext {halves} %{name}s{lanes} to {vector}",
    "i16": """  %{name}_wide = zext {halves} %{name}s{lanes} to {whole}
  %{name}_upper = shl {whole} %{name}_wide, splat (i32 16)
  %{name} = bitcast {whole} %{name}_upper to {vector}""",
}
COLUMN_SHIFT = """  %bias_at{l} = getelementptr {half}, ptr %biases, i64 %at{l}
  %bias{l} = load {half}, ptr %bias_at{l}
  %biass0 = freeze {halves} zeroinitializer
  %biass{l_next} = insertelement {halves} %biass{l}, {half} %bias{l}, i64 {l}
{bias}
  %middle = fmul {vector} %scale, splat (float {middle}.0)
  %shift = fadd {vector} %bias, %middle"""
SHIFTED = {
    True: "  %values{j} = fadd {vector} %scaled{j}, %shift",
    False: "  %values{j} = freeze {vector} %scaled{j}",
}


def text_of(
    by_rows: bool, bits: int, size: int, scales: str, affine: bool, registers: Registers
) -> str:
    """The product x W^T, or `by_rows` x W, for groups of `size` columns and scales of a type."""
    lanes, most = registers.lanes, registers.tokens
    names: dict[str, str | int] = {
        **{"lanes": lanes, "width": registers.width, "vectors": registers.vectors},
        "part_width": registers.part_width,
        **{"depth": DEPTH, "size": size, "bits": bits, "most": most, "given": GIVEN},
        **{"middle": 1 << (bits - 1), "aligned": F32 * lanes, "mask": f"<{lanes} x i1>"},
        **{"vector": f"<{lanes} x float>", "whole": f"<{lanes} x i32>"},
        "pointers": f"<{lanes} x ptr>",
    }
    fields = "\n".join(
        f"  %{name}_field = getelementptr i64, ptr %job, i64 {at}\n"
        f"  %{'all_' if name in OF_TOKENS else ''}{name} = "
        f"load {'ptr' if name in ADDRESSES else 'i64'}, ptr %{name}_field"
        for at, name in enumerate(JOB)
        if at
    )
    names["cases"] = " ".join(f"i64 {count}, label %few{count}" for count in range(1, most))
    names["calls"] = "\n".join(
        f"few{count}:\n  call void @few{count}({GIVEN})\n  br label %again"
        for count in range(1, most + 1)
    )
    few = [_few(count, names, registers) for count in range(1, most + 1)]
    dequantize = _by_rows if by_rows else _by_columns
    product = _repeated(PRODUCT, names | {"fields": fields}, {"i": range(most)}, lanes)
    return "\n".join([product, *few, dequantize(scales, affine, registers, names)])


def _few(count: int, names: Names, registers: Registers) -> str:
    """The function that adds the products of so many tokens with a panel."""
    repeated = {"i": range(count), "v": range(registers.vectors)}
    names, loops = names | {"count": count, "done": 0}, list[str]()
    for steps in dict.fromkeys((registers.steps, 1)):
        names = names | {"steps": steps}
        loops.append(_repeated(LOOP, names, repeated | {"u": range(steps)}, registers.lanes))
        names["done"] = steps
    text = FEW.replace("{loops}", "\n".join(loops))
    return _repeated(text, names, repeated, registers.lanes)


def _by_rows(scales: str, affine: bool, registers: Registers, names: Names) -> str:
    size, bits = int(names["size"]), int(names["bits"])
    piece = min(size, registers.width)
    octets = piece * bits // 8
    order = ", ".join(f"i32 {at // 2 + octets * (at % 2)}" for at in range(piece))
    names = names | {"piece": piece, "octets": octets, "per_octet": 8 // bits}
    names["block_octets"] = DEPTH * size * bits // 8
    names["half"] = half = HALVES[scales]
    names["unpack"] = UNPACK[bits].format(octets=octets, size=piece, order=order)
    names["scale"] = READ[half].format(name="scale")
    names["bias"] = READ[half].format(name="bias")
    shift = ROW_SHIFT if affine else "  %values = freeze <{piece} x float> %scaled"
    return BY_ROWS.format(**names, shift=shift.format(**names))


def _by_columns(scales: str, affine: bool, registers: Registers, names: Names) -> str:
    size, bits, lanes = int(names["size"]), int(names["bits"]), registers.lanes
    half = {"float32": "float", "float16": "half", "bfloat16": "i16"}[scales]
    names = names | {"half": half, "halves": f"<{lanes} x {half}>"}
    names |= {"group_octets": size * bits // 8, "block_octets": DEPTH * bits // 8}
    names |= {"group_words": size * bits // 32, "word_codes": 32 // bits, "most": (1 << bits) - 1}
    repeated = {"l": range(lanes), "j": range(32 // bits)}
    names["scale"] = WIDER[half].format(**names, name="scale")
    names["bias"] = WIDER[half].format(**names, name="bias")
    text = BY_COLUMNS.replace("{shift}", COLUMN_SHIFT if affine else "")
    return _repeated(text.replace("{shifted}", SHIFTED[affine]), names, repeated, lanes)


def _repeated(text: str, names: Names, repeated: Mapping[str, range], lanes: int) -> str:
    """A text in which lines that name a counter stand once for each of its values."""
    lines = []
    for line in text.splitlines():
        counters = [name for name in repeated if f"{{{name}}}" in line]
        for values in product(*(repeated[name] for name in counters)):
            counted: Names = dict(zip(counters, values, strict=True))
            counted |= {"l_next": int(counted.get("l", 0)) + 1}
            counted |= {"u_next": int(counted.get("u", 0)) + 1}
            counted |= {"moved": int(counted.get("j", 0)) * int(names["bits"])}
            counted |= {"places": _places(int(counted.get("v", 0)) * lanes, lanes)}
            lines.append(line.format(**names | counted))
    return "\n".join(lines)


def _places(first: int, lanes: int) -> str:
    return ", ".join(f"i32 {first + lane}" for lane in range(lanes))
