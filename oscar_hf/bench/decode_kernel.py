"""`oscar-hf bench kernel`: decode attention on packed data against dequantize + SDPA and SDPA on BF16."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..artifact.config import KEY_BLOCK, OscarConfig
from ..errors import OscarError
from ..kernels.decode import DecodeStore, decode_attention, decode_problem
from ..kernels.decode.reference import decode_attention_reference
from ..kernels.dequantize import dequantize_rows
from ..quantization.kv_side import Side, SideFormat
from ..quantization.packed_rows import PackedRows
from ..quantization.quantizer import ScaleRule
from .device import Device, attempt
from .report import Column, table
from .timing import ROTATE_BYTES, copy_bandwidth, graph_microseconds, machine

SINK, RECENT = OscarConfig.sink_tokens, OscarConfig.recent_tokens


@dataclass(frozen=True)
class Row:
    """One shape of the table: batch, tokens, query heads, KV heads, head dim, group size.

    capacity: packed tokens that a static cache has room for, its lengths on the device; 0 for a growing cache. folded: the
    value rotation is folded into the model (`fold_value_rotation`). former: the storage of format 1, with minima and one mean
    of all keys in place of symmetric rows and a center for each block of keys.
    """

    batch: int
    tokens: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    group_size: int = 128
    capacity: int = 0
    folded: bool = False
    former: bool = False

    @property
    def name(self) -> str:
        """Short name for the table."""
        heads = f"Hq {self.query_heads}, Hkv {self.kv_heads}, D {self.head_dim}, G {self.group_size}"
        room = f", room for {self.capacity}" if self.capacity else ""
        kind = f"{', folded values' if self.folded else ''}{', former storage' if self.former else ''}"
        return f"{self.batch} x {self.tokens}, {heads}{room}{kind}"


ROWS = [
    Row(1, 32768),
    Row(1, 102400),
    Row(8, 102400),
    Row(32, 32768),
    Row(8, 32768, 9, 3, 64, 64),
    Row(8, 32768, 4, 1, 256, 128),
    Row(8, 32768, 40, 8),
    Row(8, 32768, 96, 8),
    Row(8, 32768, group_size=64),
    # A static cache must not pay for the room that it does not use.
    Row(1, 4096, capacity=8192),
    Row(1, 4096, capacity=131072),
    # What minima and one mean of all keys cost, to compare with rows 1 and 4.
    Row(1, 32768, former=True),
    Row(32, 32768, former=True),
    Row(1, 32768, folded=True),
    Row(8, 102400, folded=True),
]


def choose_rows(names: list[str]) -> list[Row]:
    """The rows of ROWS that are named: by number from 1 (`3`, `1-4`) or by a part of their name (`D 64`, `8 x 102400`).

    Raises OscarError for what names none.
    """
    chosen = []
    for name in names:
        first, dash, last = name.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            numbers = range(int(first), int(last or first) + 1)
            found = [row for number, row in enumerate(ROWS, 1) if number in numbers]
        else:
            found = [row for row in ROWS if name.lower() in row.name.lower()]
        if not found:
            known = "; ".join(f"{number} = {row.name}" for number, row in enumerate(ROWS, 1))
            raise OscarError(
                f"--rows {name!r} names no row: use numbers, ranges such as 1-4, or parts of names. {known}"
            )
        chosen += [row for row in found if row not in chosen]
    return chosen


def random_store(row: Row, seed: int, device: str = "cuda") -> tuple[torch.Tensor, DecodeStore]:
    """A BF16 query [B, Hq, 1, D] and a store of random codes, scales, centers, windows and rotations on a device.

    Keys centered by blocks have a part in common that is three times what is left of one without it.
    """
    generator = torch.Generator(device).manual_seed(seed)
    history, dim = row.tokens - SINK - RECENT, row.head_dim
    if history < 1:
        raise ValueError(f"a row needs more than {SINK + RECENT} tokens, got {row.tokens}")

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    def rows(center_block=0):
        capacity = row.capacity or -(-history // 64) * 64
        packed = PackedRows(
            row.batch, row.kv_heads, dim, row.group_size, not row.former, device, capacity, center_block
        )
        packed.codes.random_(-(1 << 15), (1 << 15) - 1, generator=generator)
        packed.scale.copy_(torch.rand(packed.scale.shape, device=device, generator=generator) * 0.6 + 0.5)
        if packed.min is not None:
            packed.min.copy_(-1.5 * packed.scale + 0.2 * normal(*packed.min.shape, dtype=torch.float16))
        if packed.centers is not None:
            packed.centers.copy_(common + 0.3 * normal(*packed.centers.shape, dtype=torch.float16))
        return packed

    def window(tokens):
        return normal(row.batch, row.kv_heads, tokens, dim)

    def rotation():
        return torch.linalg.qr(normal(row.kv_heads, dim, dim, dtype=torch.float32))[0].contiguous()

    def length(tokens):
        return torch.tensor([tokens], dtype=torch.int32, device=device) if row.capacity else tokens

    form = SideFormat(dim, row.group_size, not row.former, ScaleRule())
    windows = [{"sink": window(SINK), "ring": window(RECENT)} for _ in "kv"]
    common = mean = None
    if row.former:
        mean = 0.1 * normal(row.kv_heads, dim, dtype=torch.float32)
    else:
        common = 3 * normal(row.kv_heads, 1, dim)
        windows[0] = {name: keys + common for name, keys in windows[0].items()}
    keys = Side(form, rows(0 if row.former else KEY_BLOCK), inverse=rotation().mT, mean=mean, **windows[0])
    values = Side(form, rows(), inverse=None if row.folded else rotation(), **windows[1])
    store = DecodeStore(keys, values, length(row.tokens), length(history))
    return normal(row.batch, row.query_heads, 1, dim), store


def packed_bytes(row: Row) -> int:
    """Bytes that decode attention must read at least."""
    history = row.tokens - SINK - RECENT
    per_token = 2 * (row.head_dim // 4 + (4 if row.former else 2) * row.head_dim // row.group_size)
    centers = 0 if row.former else -(-history // KEY_BLOCK) * 2 * row.head_dim
    exact = (SINK + RECENT) * 2 * row.head_dim * 2
    return row.batch * row.kv_heads * (history * per_token + centers + exact)


def relative_error(query: torch.Tensor, store: DecodeStore) -> float:
    """Error of a fresh call against float64 on the same codes, ||out - ref|| / ||ref||, batch row by row."""
    # Fills every empty tensor with NaN, so that an element nobody wrote cannot pass.
    torch.use_deterministic_algorithms(True, warn_only=True)
    output = decode_attention(query, store)
    torch.use_deterministic_algorithms(False)
    error = reference_norm = 0.0
    for b in range(query.shape[0]):
        keys, values = (side.mapped(lambda t, b=b: t[b : b + 1]) for side in (store.keys, store.values))
        expected = decode_attention_reference(query[b : b + 1], dataclasses.replace(store, keys=keys, values=values))
        error += (output[b : b + 1].double() - expected).square().sum().item()
        reference_norm += expected.square().sum().item()
    return (error / reference_norm) ** 0.5


def bf16_rivals(row: Row, device: Device) -> tuple[dict[str, float | None], dict[str, str]]:
    """(microseconds, problems) of PyTorch's flash and cuDNN attention on BF16 keys and values of the same shape; not every
    backend takes every shape."""
    sets = max(1, min(6, ROTATE_BYTES // (4 * row.batch * row.kv_heads * row.tokens * row.head_dim) + 1))
    shape = (row.batch, row.kv_heads, row.tokens, row.head_dim)

    def measure(backend):
        pairs = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(sets)]
        query = torch.randn(row.batch, row.query_heads, 1, row.head_dim, device="cuda", dtype=torch.bfloat16)

        def attend(keys, values):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        return graph_microseconds([lambda pair=pair: attend(*pair) for pair in pairs])

    times, problems = {}, {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        times[name], problem = attempt(device, measure, backend)
        if problem:
            problems[name] = problem
    return times, problems


def dequantize_rival(row: Row, query, store: DecodeStore) -> float:
    """Microseconds of what a cache without a fused kernel does: dequantize everything, then flash attention."""
    history = int(store.history)

    def run():
        keys, values = (dequantize_rows(side, 0, history, torch.bfloat16) for side in (store.keys, store.values))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return graph_microseconds([run], repeats=3)


def measure(row: Row, bandwidth: float, device: Device) -> dict:
    """One row of the table, times in microseconds; what did not run is None and has its reason in `problems`."""
    rivals, problems = bf16_rivals(row, device)
    count = max(1, min(12, ROTATE_BYTES // packed_bytes(row) + 1))
    stores = [random_store(row, seed) for seed in range(count)]
    if problem := decode_problem(*stores[0]):
        raise OscarError(problem)
    microseconds = graph_microseconds([lambda s=s: decode_attention(*s) for s in stores])
    dequantize, problem = attempt(device, dequantize_rival, row, *stores[0])
    if problem:
        problems["dequantize_sdpa"] = problem
    best = min((t for t in rivals.values() if t is not None), default=None)
    rate = packed_bytes(row) / microseconds * 1e6
    return {
        "shape": row.name,
        "oscar_us": microseconds,
        **{f"{name}_us": t for name, t in rivals.items()},
        "dequantize_sdpa_us": dequantize,
        "speedup": None if best is None else best / microseconds,
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / bandwidth,
        "relative_error": relative_error(*stores[0]),
        "problems": problems,
    }


def bench_kernel(rows: list[Row]) -> dict:
    """`measure` every row; returns {machine, copy_gb_per_s, rows}. A row that fails has its `problem` alone."""
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    bandwidth, results = copy_bandwidth(), []
    for row in rows:
        result, problem = attempt(device, measure, row, bandwidth, device)
        results.append(result or {"shape": row.name, "problem": problem})
        print(format_rows(results[-1:], header=len(results) == 1), flush=True)
    return {"machine": machine(), "copy_gb_per_s": bandwidth / 1e9, "rows": results}


COLUMNS: list[Column] = [
    ("shape", "shape", "s"),
    ("OSCAR us", "oscar_us", ".1f"),
    ("flash us", "flash_us", ".1f"),
    ("cuDNN us", "cudnn_us", ".1f"),
    ("dequantize + SDPA us", "dequantize_sdpa_us", ".0f"),
    ("speed-up", "speedup", lambda x: f"{x:.2f}x"),
    ("GB/s", "gb_per_s", ".0f"),
    ("of copy", "share_of_copy", ".0%"),
    ("error", "relative_error", ".1e"),
]


def format_rows(results: list[dict], header: bool = True) -> str:
    """A Markdown table of bench_kernel's rows."""
    return table(results, COLUMNS, header)
