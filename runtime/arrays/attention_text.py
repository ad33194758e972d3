"""The text of attention to tiles of keys, in LLVM's language.

`runtime.arrays.compiled_attention` says how it goes, and runs it.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.arrays.attention_scratch import BLOCK, TILE, scratch_sections
from runtime.arrays.product_text import F32, Names, Registers
from runtime.arrays.vector_text import hexadecimal, splat, vector_exp, vector_tanh
from runtime.machine.threads import MOST_THREADS, SPINS, WAIT, WAKE

REGISTERS = {16: Registers(16, 4, 6), 8: Registers(8, 2, 6)}  # a tile has whole panels of them
UNSEEN = -1e30  # the largest score of a row that has seen no key
ARRAYS = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
"""Each has its address, and how many values are from one head, and from one row, to the next."""
OF_PREFIX = ("k", "v", "dk", "dv")
SECTIONS = tuple(scratch_sections(1, 1, backward=True) | scratch_sections(1, 1, backward=False))
FIELDS = (
    *("slots", "scratch", "scratch_size", "tokens", "groups", "repeats", "width", "value_width"),
    *("scale", "lows", "top", "total", "turns", "sleepers", "prefix"),
    *(name + part for name in ARRAYS for part in ("", "_head", "_row")),
    *(f"prefix_{name}{part}" for name in OF_PREFIX for part in ("", "_head")),
    *(f"at_{name}" for name in SECTIONS),
)
"""What attention takes, each 8 bytes: addresses, counts, and a scale in float32.

`slots` counts the threads that have taken a part of `scratch`. `lows` has for each token the first
that it sees. top and total are (H, T): of each row of scores the largest and the sum of e to what
they are below it; backward the log-sum-exp, and rowsum(dO * O). `turns` has for each tile of keys
of each group the block of queries that may add to its gradients, and `sleepers` counts the threads
that sleep until theirs comes. A prefix has rows of its own.
"""
_ADDRESSES = {
    *("scratch", "lows", "top", "total", "turns", "sleepers", *ARRAYS),
    *(f"prefix_{name}" for name in OF_PREFIX),
}

DECLARED = """
declare i64 @llvm.umin.i64(i64, i64)
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
declare float @llvm.vector.reduce.fmax.v{lanes}f32({vector})
declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})
declare {vector} @llvm.masked.load.v{lanes}f32.p0(ptr, i32, {mask}, {vector})
declare void @llvm.masked.store.v{lanes}f32.p0({vector}, ptr, i32, {mask})
declare void @llvm.x86.sse2.pause()
"""
# The parts of a forward or backward: a group of heads that share keys, and a block of queries.
# Parts with the most keys come first. Tiles of a prefix come before those of the sequence.
PARTS = """
define void @{name}(ptr %job, ptr %own) {{
begin:
  %given_at = getelementptr i64, ptr %job, i64 1
  %given = load ptr, ptr %given_at
{fields}
  %scale_narrow = trunc i64 %scale to i32
  %scale_float = bitcast i32 %scale_narrow to float
  %slot = atomicrmw add ptr %given, i64 1 seq_cst
  %slot_at = mul i64 %slot, %scratch_size
  %mine = getelementptr float, ptr %scratch, i64 %slot_at
{sections}
  %blocks_more = add i64 %tokens, {block_before}
  %blocks = udiv i64 %blocks_more, {block}
  %parts = mul i64 %blocks, %groups
  %prefix_more = add i64 %prefix, {tile_before}
  %prefix_tiles = udiv i64 %prefix_more, {tile}
  %has_prefix = icmp ne i64 %prefix, 0
  %tiles_before = add i64 %tokens, {tile_before}
  %own_tiles = udiv i64 %tiles_before, {tile}
  %all_tiles = add i64 %own_tiles, %prefix_tiles
  %width_more = add i64 %width, {panel_before}
  %width_panels = udiv i64 %width_more, {panel}
  %width_padded = mul i64 %width_panels, {panel}
  %value_more = add i64 %value_width, {panel_before}
  %value_panels = udiv i64 %value_more, {panel}
  %value_padded = mul i64 %value_panels, {panel}
  br label %part
part:
  %number = atomicrmw add ptr %job, i64 1 seq_cst
  %some = icmp ult i64 %number, %parts
  br i1 %some, label %begins, label %end
begins:
  %group = urem i64 %number, %groups
  %block_down = udiv i64 %number, %groups
  %blocks_left = sub i64 %blocks, %block_down
  %block = sub i64 %blocks_left, 1
  %first = mul i64 %block, {block}
  %rows_left = sub i64 %tokens, %first
  %rows = call i64 @llvm.umin.i64(i64 %rows_left, i64 {block})
  %lows_at = getelementptr i32, ptr %lows, i64 %first
  %low_narrow = load i32, ptr %lows_at
  %low = zext i32 %low_narrow to i64
  %low_tile = udiv i64 %low, {tile}
  %first_tile = add i64 %low_tile, %prefix_tiles
  %stop = add i64 %first, %rows
  %last = sub i64 %stop, 1
  %last_down = udiv i64 %last, {tile}
  %last_tile = add i64 %last_down, %prefix_tiles
  %head_first = mul i64 %group, %repeats
  %begins_at = select i1 %has_prefix, i64 0, i64 %first_tile
  br label %tile
tile:
  %j = phi i64 [%begins_at, %begins], [%next_j, %tile_end]
  %of_prefix = icmp ult i64 %j, %prefix_tiles
  %j_own = sub i64 %j, %prefix_tiles
  %j_here = select i1 %of_prefix, i64 %j, i64 %j_own
  %key = mul i64 %j_here, {tile}
  %keys_all = select i1 %of_prefix, i64 %prefix, i64 %tokens
  %keys_left = sub i64 %keys_all, %key
  %count = call i64 @llvm.umin.i64(i64 %keys_left, i64 {tile})
{tile_addresses}
  %key_narrow = trunc i64 %key to i32
  %count_narrow = trunc i64 %count to i32
{tile_begins}
  br label %head
head:
  %r = phi i64 [0, %tile], [%next_r, %head]
  %h = add i64 %head_first, %r
  %h_rows = mul i64 %h, %tokens
  %h_row = add i64 %h_rows, %first
  %top_at = getelementptr float, ptr %top, i64 %h_row
  %total_at = getelementptr float, ptr %total, i64 %h_row
{head_addresses}
{of_head}
  %next_r = add i64 %r, 1
  %more_heads = icmp ult i64 %next_r, %repeats
  br i1 %more_heads, label %head, label %{after_heads}
{tile_ends}
tile_end:
  %after_j = add i64 %j, 1
  %leaves = icmp eq i64 %after_j, %prefix_tiles
  %next_j = select i1 %leaves, i64 %first_tile, i64 %after_j
  %more_tiles = icmp ule i64 %next_j, %last_tile
  br i1 %more_tiles, label %tile, label %part
end:
  ret void
}}
"""
FIELD = """  %{name}_field = getelementptr i64, ptr %given, i64 {at}
  %{name} = load {type}, ptr %{name}_field"""
SECTION = "  %{name} = getelementptr float, ptr %mine, i64 %at_{name}"
TILE_ADDRESS = """  %{name}_of = select i1 %of_prefix, ptr %prefix_{name}, ptr %{name}
  %{name}_step = select i1 %of_prefix, i64 %prefix_{name}_head, i64 %{name}_head
  %{name}_stride = select i1 %of_prefix, i64 %{width}, i64 %{name}_row
  %{name}_group = mul i64 %group, %{name}_step
  %{name}_before = mul i64 %key, %{name}_stride
  %{name}_tile_at = add i64 %{name}_group, %{name}_before
  %{name}_tile = getelementptr float, ptr %{name}_of, i64 %{name}_tile_at"""
HEAD_ADDRESS = """  %{name}_of_head = mul i64 %h, %{name}_head
  %{name}_of_row = mul i64 %first, %{name}_row
  %{name}_at = add i64 %{name}_of_head, %{name}_of_row
  %{name}_rows = getelementptr float, ptr %{name}, i64 %{name}_at"""
ROWS = "i64 %rows, ptr %lows_at, i64 %first, i32 %key_narrow, i32 %count_narrow, i1 %of_prefix"
FORWARD_TILE = """  call void @across(ptr %k_tile, i64 %k_stride, i64 %count, i64 %width, ptr %keys_across)
  call void @pack(ptr %v_tile, i64 %v_stride, i64 %count, i64 %value_width, ptr %values)"""  # noqa: E501
FORWARD_HEAD = f"""  call void @multiply(i64 %rows, ptr %q_rows, i64 %q_row, i64 1, ptr %keys_across, i64 %width, ptr %scores, i64 {{tile}}, i1 false)
  call void @softmax({ROWS}, float %scale_float, ptr %scores, ptr %top_at, ptr %total_at, ptr %factors, ptr %sums)
  call void @multiply(i64 %rows, ptr %scores, i64 {{tile}}, i64 1, ptr %values, i64 %count, ptr %product, i64 %value_padded, i1 false)
  call void @merge(i64 %rows, ptr %out_rows, i64 %out_row, ptr %product, i64 %value_padded, i64 %value_width, ptr %factors, i64 1)"""  # noqa: E501
BACKWARD_TILE = """  store float 1.0, ptr %factors
  call void @across(ptr %k_tile, i64 %k_stride, i64 %count, i64 %width, ptr %keys_across)
  call void @across(ptr %v_tile, i64 %v_stride, i64 %count, i64 %value_width, ptr %values_across)
  call void @pack(ptr %k_tile, i64 %k_stride, i64 %count, i64 %width, ptr %keys)"""
BACKWARD_HEAD = f"""  %adds = icmp ne i64 %r, 0
  call void @multiply(i64 %rows, ptr %q_rows, i64 %q_row, i64 1, ptr %keys_across, i64 %width, ptr %scores, i64 {{tile}}, i1 false)
  call void @multiply(i64 %rows, ptr %d_out_rows, i64 %d_out_row, i64 1, ptr %values_across, i64 %value_width, ptr %d_scores, i64 {{tile}}, i1 false)
  call void @slopes({ROWS}, float %scale_float, ptr %scores, ptr %d_scores, ptr %top_at, ptr %total_at)
  call void @pack(ptr %q_rows, i64 %q_row, i64 %rows, i64 %width, ptr %queries)
  call void @pack(ptr %d_out_rows, i64 %d_out_row, i64 %rows, i64 %value_width, ptr %d_rows)
  call void @multiply(i64 %count, ptr %scores, i64 1, i64 {{tile}}, ptr %d_rows, i64 %rows, ptr %d_values, i64 %value_padded, i1 %adds)
  call void @multiply(i64 %count, ptr %d_scores, i64 1, i64 {{tile}}, ptr %queries, i64 %rows, ptr %d_keys, i64 %width_padded, i1 %adds)
  call void @multiply(i64 %rows, ptr %d_scores, i64 {{tile}}, i64 1, ptr %keys, i64 %count, ptr %product, i64 %width_padded, i1 false)
  call void @merge(i64 %rows, ptr %dq_rows, i64 %dq_row, ptr %product, i64 %width_padded, i64 %width, ptr %factors, i64 0)"""  # noqa: E501
# blocks of queries add in their order, whichever thread has them
BACKWARD_END = f"""waits:
  %turn_group = mul i64 %group, %all_tiles
  %turn_place = add i64 %turn_group, %j
  %turn_at = getelementptr i32, ptr %turns, i64 %turn_place
  %block_narrow = trunc i64 %block to i32
  br label %look
look:
  %spins = phi i64 [0, %waits], [%more_spins, %spin], [0, %sleep]
  %turn = load atomic i32, ptr %turn_at seq_cst, align 4
  %is_mine = icmp eq i32 %turn, %block_narrow
  br i1 %is_mine, label %adds_up, label %spin
spin:
  call void @llvm.x86.sse2.pause()
  %more_spins = add i64 %spins, 1
  %tired = icmp ugt i64 %more_spins, {SPINS}
  br i1 %tired, label %sleep, label %look
sleep:
  %turn_wide = zext i32 %turn to i64
  %lies = atomicrmw add ptr %sleepers, i64 1 seq_cst
  %slept = {WAIT(at="turn_at", value="%turn_wide")}
  %wakes = atomicrmw sub ptr %sleepers, i64 1 seq_cst
  br label %look
adds_up:
  call void @merge(i64 %count, ptr %dk_tile, i64 %dk_stride, ptr %d_keys, i64 %width_padded, i64 %width, ptr %factors, i64 0)
  call void @merge(i64 %count, ptr %dv_tile, i64 %dv_stride, ptr %d_values, i64 %value_padded, i64 %value_width, ptr %factors, i64 0)
  %next_turn = sub i32 %block_narrow, 1
  store atomic i32 %next_turn, ptr %turn_at seq_cst, align 4
  %asleep = load atomic i64, ptr %sleepers seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %tell, label %tile_end
tell:
  %told = {WAKE(at="turn_at", value=MOST_THREADS)}
  br label %tile_end"""  # noqa: E501
# y (rows, columns) = x P, or += x P, of panels P (columns / {panel}, deep, {panel}), and any steps
# of x.
MULTIPLY = """
define internal void @multiply(i64 %rows, ptr %x, i64 %x_step, i64 %x_inner, ptr %panels, i64 %deep, ptr %y, i64 %columns, i1 %sums) {{
begin:
  br label %panel
panel:
  %c = phi i64 [0, %begin], [%next_c, %done]
  %before = mul i64 %c, %deep
  %panel_at = getelementptr float, ptr %panels, i64 %before
  %y_c = getelementptr float, ptr %y, i64 %c
  br label %look
look:
  %t = phi i64 [0, %panel], [%next_t, %whole]
  %rest = sub i64 %rows, %t
  %x_before = mul i64 %t, %x_step
  %x_t = getelementptr float, ptr %x, i64 %x_before
  %y_before = mul i64 %t, %columns
  %y_t = getelementptr float, ptr %y_c, i64 %y_before
  %full = icmp uge i64 %rest, {most}
  br i1 %full, label %whole, label %few
whole:
  call void @few{most}({given})
  %next_t = add i64 %t, {most}
  br label %look
few:
  switch i64 %rest, label %done [{cases}]
{calls}
done:
  %next_c = add i64 %c, {panel}
  %more = icmp ult i64 %next_c, %columns
  br i1 %more, label %panel, label %end
end:
  ret void
}}
"""  # noqa: E501
GIVEN = "ptr %x_t, i64 %x_step, i64 %x_inner, ptr %panel_at, i64 %deep, ptr %y_t, i64 %columns, i1 %sums"  # noqa: E501
# A line with {i} or {v} stands there once for each of them.
FEW = """define internal void @few{count}({given}) {{
begin:
  %x_before{i} = mul i64 %x_step, {i}
  %x{i} = getelementptr float, ptr %x_t, i64 %x_before{i}
  %y_before{i} = mul i64 %columns, {i}
  %y{i} = getelementptr float, ptr %y_t, i64 %y_before{i}
  %y{i}_{v} = getelementptr {vector}, ptr %y{i}, i64 {v}
  br i1 %sums, label %loads, label %starts
loads:
  %old{i}_{v} = load {vector}, ptr %y{i}_{v}, align {aligned}
  br label %starts
starts:
  %sum{i}_{v} = phi {vector} [zeroinitializer, %begin], [%old{i}_{v}, %loads]
  br label %inner
inner:
  %d = phi i64 [0, %starts], [%next_d, %inner]
  %x_off = phi i64 [0, %starts], [%next_off, %inner]
  %z{i}_{v} = phi {vector} [%sum{i}_{v}, %starts], [%next{i}_{v}, %inner]
  %p = getelementptr [{panel} x float], ptr %panel_at, i64 %d
  %p{v} = getelementptr {vector}, ptr %p, i64 {v}
  %w{v} = load {vector}, ptr %p{v}, align {aligned}
  %x_at{i} = getelementptr float, ptr %x{i}, i64 %x_off
  %one{i} = load float, ptr %x_at{i}
  %first{i} = insertelement {vector} poison, float %one{i}, i64 0
  %all{i} = shufflevector {vector} %first{i}, {vector} poison, {whole} zeroinitializer
  %next{i}_{v} = call {vector} @llvm.fma.v{lanes}f32({vector} %all{i}, {vector} %w{v}, {vector} %z{i}_{v})
  %next_d = add i64 %d, 1
  %next_off = add i64 %x_off, %x_inner
  %more = icmp ult i64 %next_d, %deep
  br i1 %more, label %inner, label %end
end:
  store {vector} %next{i}_{v}, ptr %y{i}_{v}, align {aligned}
  ret void
}}
"""  # noqa: E501
# Rows (rows, columns) as panels (columns / {panel}, rows, {panel}), and zeros past the last column.
PACK = """
define internal void @pack(ptr %source, i64 %step, i64 %rows, i64 %columns, ptr %panels) {{
begin:
  %panel_size = mul i64 %rows, {panel}
  br label %some
some:
  %c = phi i64 [0, %begin], [%next_c, %done]
  %left = sub i64 %columns, %c
  %left_narrow = trunc i64 %left to i32
{left_narrow_all}
  %mask = icmp ugt {whole} %left_narrow_all, <{places}>
  %panel = udiv i64 %c, {panel}
  %within = urem i64 %c, {panel}
  %before = mul i64 %panel, %panel_size
  %to_at = add i64 %before, %within
  %to = getelementptr float, ptr %panels, i64 %to_at
  %from = getelementptr float, ptr %source, i64 %c
  br label %row
row:
  %r = phi i64 [0, %some], [%next_r, %row]
  %down = mul i64 %r, %step
  %from_r = getelementptr float, ptr %from, i64 %down
  %value = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %from_r, i32 4, {mask} %mask, {vector} zeroinitializer)
  %to_r = getelementptr [{panel} x float], ptr %to, i64 %r
  store {vector} %value, ptr %to_r, align {aligned}
  %next_r = add i64 %r, 1
  %more = icmp ult i64 %next_r, %rows
  br i1 %more, label %row, label %done
done:
  %next_c = add i64 %c, {lanes}
  %more_columns = icmp ult i64 %next_c, %columns
  br i1 %more_columns, label %some, label %end
end:
  ret void
}}
"""  # noqa: E501
# Rows (rows, columns) as panels (rows / {panel}, columns, {panel}) of their transpose, a square of
# values at a time: rows past the last are the last one, and columns past it zeros, which the next
# square or nothing takes the place of.
ACROSS = """
define internal void @across(ptr %source, i64 %step, i64 %rows, i64 %columns, ptr %panels) {{
begin:
  %panel_size = mul i64 %columns, {panel}
  %last = sub i64 %rows, 1
  br label %some
some:
  %r = phi i64 [0, %begin], [%next_r, %done]
  %panel = udiv i64 %r, {panel}
  %within = urem i64 %r, {panel}
  %before = mul i64 %panel, %panel_size
  %to_at = add i64 %before, %within
  %to = getelementptr float, ptr %panels, i64 %to_at
  %row{l} = add i64 %r, {l}
  %there{l} = call i64 @llvm.umin.i64(i64 %row{l}, i64 %last)
  %down{l} = mul i64 %there{l}, %step
  %from{l} = getelementptr float, ptr %source, i64 %down{l}
  br label %square
square:
  %c = phi i64 [0, %some], [%next_c, %square]
  %left = sub i64 %columns, %c
  %left_narrow = trunc i64 %left to i32
{left_narrow_all}
  %mask = icmp ugt {whole} %left_narrow_all, <{places}>
  %at{l} = getelementptr float, ptr %from{l}, i64 %c
  %t0_{l} = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %at{l}, i32 4, {mask} %mask, {vector} zeroinitializer)
{turned}
  %c{l} = add i64 %c, {l}
  %to{l} = getelementptr [{panel} x float], ptr %to, i64 %c{l}
  store {vector} %t{stages}_{l}, ptr %to{l}, align {aligned}
  %next_c = add i64 %c, {lanes}
  %more = icmp ult i64 %next_c, %columns
  br i1 %more, label %square, label %done
done:
  %next_r = add i64 %r, {lanes}
  %more_rows = icmp ult i64 %next_r, %rows
  br i1 %more_rows, label %some, label %end
end:
  ret void
}}
"""  # noqa: E501
# to = to * factor + from, a row at a time; a masked store takes longer than a plain one.
MERGE = """
define internal void @merge(i64 %rows, ptr %to, i64 %to_step, ptr %from, i64 %from_step, i64 %columns, ptr %factors, i64 %factor_step) {{
begin:
  br label %row
row:
  %r = phi i64 [0, %begin], [%next_r, %done]
  %to_down = mul i64 %r, %to_step
  %to_r = getelementptr float, ptr %to, i64 %to_down
  %from_down = mul i64 %r, %from_step
  %from_r = getelementptr float, ptr %from, i64 %from_down
  %factor_down = mul i64 %r, %factor_step
  %factor_at = getelementptr float, ptr %factors, i64 %factor_down
  %factor = load float, ptr %factor_at
{factor_all}
  br label %some
some:
  %c = phi i64 [0, %row], [%next_c, %further]
  %to_c = getelementptr float, ptr %to_r, i64 %c
  %from_c = getelementptr float, ptr %from_r, i64 %c
  %added = load {vector}, ptr %from_c, align {aligned}
  %left = sub i64 %columns, %c
  %whole = icmp uge i64 %left, {lanes}
  br i1 %whole, label %plain, label %masked
plain:
  %old = load {vector}, ptr %to_c, align 4
  %new = call {vector} @llvm.fma.v{lanes}f32({vector} %old, {vector} %factor_all, {vector} %added)
  store {vector} %new, ptr %to_c, align 4
  br label %further
masked:
  %left_narrow = trunc i64 %left to i32
{left_narrow_all}
  %mask = icmp ugt {whole} %left_narrow_all, <{places}>
  %some_old = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %to_c, i32 4, {mask} %mask, {vector} zeroinitializer)
  %some_new = call {vector} @llvm.fma.v{lanes}f32({vector} %some_old, {vector} %factor_all, {vector} %added)
  call void @llvm.masked.store.v{lanes}f32.p0({vector} %some_new, ptr %to_c, i32 4, {mask} %mask)
  br label %further
further:
  %next_c = add i64 %c, {lanes}
  %more = icmp ult i64 %next_c, %columns
  br i1 %more, label %some, label %done
done:
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %rows
  br i1 %again, label %row, label %end
end:
  ret void
}}
"""  # noqa: E501
# The first and the last key that a row sees, counted from the tile's first: `low` to below `high`.
SEEN = """  %low_at = getelementptr i32, ptr %lows, i64 %r
  %low_key = load i32, ptr %low_at
  %low_own = sub i32 %low_key, %key
  %low = select i1 %of_prefix, i32 0, i32 %low_own
  %row_of = add i64 %first, %r
  %row_narrow = trunc i64 %row_of to i32
  %high_key = sub i32 %row_narrow, %key
  %high_own = add i32 %high_key, 1
  %high = select i1 %of_prefix, i32 %count, i32 %high_own
{low_all}
{high_all}
  %s_down = mul i64 %r, {tile}
  %s_r = getelementptr float, ptr %s, i64 %s_down"""
MASK = """  %{c}_narrow = trunc i64 %{c} to i32
{c_all}
  %{c}_key = add {whole} %{c}_narrow_all, <{places}>
  %{c}_low = icmp sge {whole} %{c}_key, %low_all
  %{c}_high = icmp slt {whole} %{c}_key, %high_all
  %{c}_mask = and {mask} %{c}_low, %{c}_high"""
GIVEN_ROWS = "i64 %rows, ptr %lows, i64 %first, i32 %key, i32 %count, i1 %of_prefix, float %scale"
SOFTMAX = f"""
define internal void @softmax({GIVEN_ROWS}, ptr %s, ptr %tops, ptr %totals, ptr %factors, ptr %sums) {{{{
begin:
{{scale_all}}
  br label %row
row:
  %r = phi i64 [0, %begin], [%next_r, %summed]
{{seen}}
  br label %score
score:
  %c = phi i64 [0, %row], [%next_c, %score]
  %most = phi {{vector}} [splat (float {{unseen}}), %row], [%higher, %score]
{{c_mask}}
  %s_at = getelementptr float, ptr %s_r, i64 %c
  %product = load {{vector}}, ptr %s_at, align {{aligned}}
  %scaled = fmul {{vector}} %product, %scale_all
{{capped}}
  store {{vector}} %capped, ptr %s_at, align {{aligned}}
  %seen = select {{mask}} %c_mask, {{vector}} %capped, {{vector}} splat (float {{unseen}})
  %is_higher = fcmp ogt {{vector}} %seen, %most
  %higher = select {{mask}} %is_higher, {{vector}} %seen, {{vector}} %most
  %next_c = add i64 %c, {{lanes}}
  %more = icmp ult i64 %next_c, {{tile}}
  br i1 %more, label %score, label %scored
scored:
  %here = call nnan float @llvm.vector.reduce.fmax.v{{lanes}}f32({{vector}} %higher)
  %top_at = getelementptr float, ptr %tops, i64 %r
  %old_top = load float, ptr %top_at
  %is_new = fcmp ogt float %here, %old_top
  %top = select i1 %is_new, float %here, float %old_top
  store float %top, ptr %top_at
  %fell = fsub float %old_top, %top
  %fell_at = getelementptr float, ptr %factors, i64 %r
  store float %fell, ptr %fell_at
{{top_all}}
  br label %power
power:
  %e = phi i64 [0, %scored], [%next_e, %power]
  %sum = phi {{vector}} [zeroinitializer, %scored], [%more_sum, %power]
{{e_mask}}
  %p_at = getelementptr float, ptr %s_r, i64 %e
  %one = load {{vector}}, ptr %p_at, align {{aligned}}
  %below = fsub {{vector}} %one, %top_all
{{exp}}
  %p = select {{mask}} %e_mask, {{vector}} %power_of, {{vector}} zeroinitializer
  store {{vector}} %p, ptr %p_at, align {{aligned}}
  %more_sum = fadd {{vector}} %sum, %p
  %next_e = add i64 %e, {{lanes}}
  %more_e = icmp ult i64 %next_e, {{tile}}
  br i1 %more_e, label %power, label %summed
summed:
  %row_sum = call reassoc float @llvm.vector.reduce.fadd.v{{lanes}}f32(float 0.0, {{vector}} %more_sum)
  %sum_at = getelementptr float, ptr %sums, i64 %r
  store float %row_sum, ptr %sum_at
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %rows
  br i1 %again, label %row, label %fall
fall:
  %f = phi i64 [0, %summed], [%next_f, %fall]
  %left = sub i64 %rows, %f
  %left_narrow = trunc i64 %left to i32
{{left_narrow_all}}
  %mask = icmp ugt {{whole}} %left_narrow_all, <{{places}}>
  %factor_at = getelementptr float, ptr %factors, i64 %f
  %fallen = load {{vector}}, ptr %factor_at, align {{aligned}}
{{exp_fall}}
  store {{vector}} %factor, ptr %factor_at, align {{aligned}}
  %added_at = getelementptr float, ptr %sums, i64 %f
  %added = load {{vector}}, ptr %added_at, align {{aligned}}
  %total_at = getelementptr float, ptr %totals, i64 %f
  %old = call {{vector}} @llvm.masked.load.v{{lanes}}f32.p0(ptr %total_at, i32 4, {{mask}} %mask, {{vector}} zeroinitializer)
  %new = call {{vector}} @llvm.fma.v{{lanes}}f32({{vector}} %old, {{vector}} %factor, {{vector}} %added)
  call void @llvm.masked.store.v{{lanes}}f32.p0({{vector}} %new, ptr %total_at, i32 4, {{mask}} %mask)
  %next_f = add i64 %f, {{lanes}}
  %more_f = icmp ult i64 %next_f, %rows
  br i1 %more_f, label %fall, label %end
end:
  ret void
}}}}
"""  # noqa: E501
SLOPES = f"""
define internal void @slopes({GIVEN_ROWS}, ptr %s, ptr %d, ptr %lses, ptr %inners) {{{{
begin:
{{scale_all}}
  br label %row
row:
  %r = phi i64 [0, %begin], [%next_r, %done]
{{seen}}
  %d_r = getelementptr float, ptr %d, i64 %s_down
  %lse_at = getelementptr float, ptr %lses, i64 %r
  %lse = load float, ptr %lse_at
{{lse_all}}
  %inner_at = getelementptr float, ptr %inners, i64 %r
  %inner = load float, ptr %inner_at
{{inner_all}}
  br label %score
score:
  %c = phi i64 [0, %row], [%next_c, %score]
{{c_mask}}
  %s_at = getelementptr float, ptr %s_r, i64 %c
  %product = load {{vector}}, ptr %s_at, align {{aligned}}
  %scaled = fmul {{vector}} %product, %scale_all
{{capped}}
  %below = fsub {{vector}} %capped, %lse_all
{{exp}}
  %p = select {{mask}} %c_mask, {{vector}} %power_of, {{vector}} zeroinitializer
  store {{vector}} %p, ptr %s_at, align {{aligned}}
  %d_at = getelementptr float, ptr %d_r, i64 %c
  %dp = load {{vector}}, ptr %d_at, align {{aligned}}
  %apart = fsub {{vector}} %dp, %inner_all
  %weighed = fmul {{vector}} %apart, %p
  %ds_scaled = fmul {{vector}} %weighed, %scale_all
{{slope}}
  %ds = select {{mask}} %c_mask, {{vector}} %ds_all, {{vector}} zeroinitializer
  store {{vector}} %ds, ptr %d_at, align {{aligned}}
  %next_c = add i64 %c, {{lanes}}
  %more = icmp ult i64 %next_c, {{tile}}
  br i1 %more, label %score, label %done
done:
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %rows
  br i1 %again, label %row, label %end
end:
  ret void
}}}}
"""
CAPPED = """{tanh}
  %capped = fmul {vector} %curve, splat (float {cap})"""
SLOPE = """  %flat = fmul {vector} %curve, %curve
  %steep = fsub {vector} splat (float 1.0), %flat
  %ds_all = fmul {vector} %ds_scaled, %steep"""


def text_of(backward: bool, cap: float | None, lanes: int) -> str:
    """Attention's forward, or its backward, for scores with a cap or without."""
    registers = REGISTERS[lanes]
    names: Names = {
        **{"lanes": lanes, "panel": registers.width, "panel_before": registers.width - 1},
        **{"most": registers.tokens, "given": GIVEN, "aligned": F32 * lanes},
        **{"vector": f"<{lanes} x float>", "whole": f"<{lanes} x i32>", "mask": f"<{lanes} x i1>"},
        **{"block": BLOCK, "block_before": BLOCK - 1, "tile": TILE, "tile_before": TILE - 1},
        "places": ", ".join(f"i32 {lane}" for lane in range(lanes)),
        "unseen": hexadecimal(UNSEEN),
    }
    names |= _addresses(backward) | _counts(registers.tokens)
    names |= _splats(lanes)
    for c in ("c", "e"):
        names[f"{c}_mask"] = MASK.format(**names, c=c, c_all=names[f"{c}_narrow_all"])
    names["seen"] = SEEN.format(**names)
    names |= _curves(names, cap, lanes)
    texts = (DECLARED, PARTS, MULTIPLY, PACK, MERGE, SLOPES if backward else SOFTMAX)
    few = (_few(count, names, registers) for count in range(1, registers.tokens + 1))
    return "\n".join([*(text.format(**names) for text in texts), *few, _across(names, lanes)])


def _addresses(backward: bool) -> Names:
    """What a forward or a backward does, and the addresses that it takes."""
    of_tiles = ("k", "v", "dk", "dv") if backward else ("k", "v")
    of_heads = ("q", "d_out", "dq") if backward else ("q", "out")
    lines = {
        "fields": [
            FIELD.format(name=name, at=at, type="ptr" if name in _ADDRESSES else "i64")
            for at, name in enumerate(FIELDS)
        ],
        "sections": [SECTION.format(name=name) for name in SECTIONS],
        "tile_addresses": [
            TILE_ADDRESS.format(name=name, width="value_width" if "v" in name else "width")
            for name in of_tiles
        ],
        "head_addresses": [HEAD_ADDRESS.format(name=name) for name in of_heads],
    }
    return {
        **{name: "\n".join(each) for name, each in lines.items()},
        "name": "backward" if backward else "forward",
        "tile_begins": BACKWARD_TILE if backward else FORWARD_TILE,
        "of_head": (BACKWARD_HEAD if backward else FORWARD_HEAD).format(tile=TILE),
        "tile_ends": BACKWARD_END if backward else "",
        "after_heads": "waits" if backward else "tile_end",
    }


def _counts(most: int) -> Names:
    """Where fewer rows than `most` are left to multiply."""
    call = "few{count}:\n  call void @few{count}({given})\n  br label %done"
    return {
        "cases": " ".join(f"i64 {count}, label %few{count}" for count in range(1, most)),
        "calls": "\n".join(call.format(count=count, given=GIVEN) for count in range(1, most)),
    }


def _splats(lanes: int) -> Names:
    """Vectors of one value each."""
    integers = ("left_narrow", "c_narrow", "e_narrow", "low", "high")
    floats = ("factor", "scale", "top", "lse", "inner")
    return {
        **{f"{name}_all": splat(name, "i32", lanes) for name in integers},
        **{f"{name}_all": splat(name, "float", lanes) for name in floats},
    }


def _curves(names: Names, cap: float | None, lanes: int) -> Names:
    """e to what scores are below another number, and the cap of scores with its slope."""
    curves: Names = {
        "exp": vector_exp("below", "power_of", lanes),
        "exp_fall": vector_exp("fallen", "factor", lanes),
        "capped": "  %capped = freeze {vector} %scaled".format(**names),
        "slope": "  %ds_all = freeze {vector} %ds_scaled".format(**names),
    }
    if cap is None:
        return curves
    tanh = vector_tanh("scaled", "curve", cap, lanes)
    curves["capped"] = CAPPED.format(**names, tanh=tanh, cap=hexadecimal(cap))
    curves["slope"] = SLOPE.format(**names)
    return curves


def _few(count: int, names: Names, registers: Registers) -> str:
    """The function that multiplies so many rows with a panel, every sum in a register."""
    return _repeated(FEW, names | {"count": count}, count, registers.vectors)


def _across(names: Names, lanes: int) -> str:
    turned = list(_turned(lanes))
    names = names | {"stages": lanes.bit_length() - 1, "turned": "\n".join(turned)}
    return _repeated(ACROSS, names, lanes, 1, "l")


def _turned(lanes: int) -> Iterator[str]:
    """The transposition of a square, which swaps halves, then quarters, and so on."""
    half, stage = lanes // 2, 0
    while half:
        for at in range(lanes):
            if at & half:
                continue
            one, other = f"%t{stage}_{at}", f"%t{stage}_{at | half}"
            first = [lane if not lane & half else lanes + lane - half for lane in range(lanes)]
            last = [lane + half if not lane & half else lanes + lane for lane in range(lanes)]
            for to, order in ((at, first), (at | half, last)):
                places = ", ".join(f"i32 {place}" for place in order)
                yield (
                    f"  %t{stage + 1}_{to} = shufflevector <{lanes} x float> {one}, "
                    f"<{lanes} x float> {other}, <{lanes} x i32> <{places}>"
                )
        half, stage = half // 2, stage + 1


def _repeated(text: str, names: Names, count: int, vectors: int, row: str = "i") -> str:
    """A text in which lines that name a row or a vector stand once for each."""
    lines = []
    for line in text.splitlines():
        rows = range(count if f"{{{row}}}" in line else 1)
        for at in rows:
            for vector in range(vectors if "{v}" in line else 1):
                lines.append(line.format(**names | {row: at, "v": vector}))
    return "\n".join(lines)
