"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) as pure functions: in chunks, step by step,
packed, and context parallel.

A head has a state S, [K, V]. A token with query q, key k, value v, log decay g <= 0 and step size b (0 to 1)
updates the state and reads its output o from it:

    S <- exp(g) (I - b k k') S + b k v',    o = S' q

Chunks: inside a chunk of C tokens, with c the cumulative sum of g, the corrections x of all tokens solve one
triangular system,

    x_i + b_i sum_{j<i} exp(c_i - c_j) (k_i . k_j) x_j = b_i (v_i - exp(c_i) S' k_i),

and with these corrections

    o_i = exp(c_i) S' q_i + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) x_j,
    S <- exp(c_C) S + sum_j exp(c_C - c_j) k_j x_j'.

All exponents are at most 0, so nothing overflows. A run is a contiguous range of one sequence on one rank.
Each run starts with a new chunk, so no state crosses from one run into another.

Context parallelism: a run maps the state before it to the state after it linearly, S -> M S + U. Ranks
exchange U and M of their runs, [K, V + K] numbers per head for any length, and apply them in order, which is
exact. To compute M and the outputs' dependence on the initial state in the same pass, the values get K more
columns of zeros, and the initial state of these columns is the identity.

Shapes: t tokens, R runs (one per sequence, or two per sequence that is split over context-parallel ranks), H
key heads, G value heads (a multiple of H), n chunks, W width of the convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megarl.config.activations import GATED_DELTA_CHUNK
from megarl.distributed.device import sent_to
from megarl.models.engine.context import ContextShare, gather_shared
from megarl.models.engine.kernels import kernels

CHUNK = GATED_DELTA_CHUNK
EPSILON = 1e-6
ALONE = ContextShare()
"""Context share of a rank whose sequences are not split."""


def unit_norm(heads: torch.Tensor) -> torch.Tensor:
    """Divide each head's vector [..., K] by its L2 norm, in float32 or wider."""
    wide = heads.to(wide_dtype(heads))
    # Add the epsilon to the sum under the root, like the kernels with which the models were trained.
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype for states and decays: float64 if the tensor is float64, otherwise float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def log_decays(inputs: torch.Tensor, log_rates: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute ``-exp(A_log) softplus(inputs + dt_bias)`` in float32 or wider: [..., G] from inputs [..., G]
    and parameters [G]."""
    dtype = wide_dtype(inputs)
    return -log_rates.to(dtype).exp() * F.softplus(inputs.to(dtype) + bias.to(dtype))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step_size: torch.Tensor,
    starts: tuple[int, ...],
    context: ContextShare = ALONE,
    rows: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of all tokens and the state after each run. Differentiable. Collective over
    context-parallel ranks.

    Args:
        query, key: [t, H, K], this context-parallel rank's shard. Keys have at most unit norm. Queries are
            scaled by 1/sqrt(K) here.
        value: [t, G, V].
        log_decay, step_size: [t, G].
        starts: first token of each sequence, counted over all context-parallel ranks; the last entry is the
            end.
        context: the context-parallel ranks that share every sequence.
        rows: 1, or the number of sequences of equal length whose tokens are interleaved: token s of row b is
            token s * rows + b.

    Returns:
        Outputs [t, G, V] and states [R, G, K, V] in float32, or in float64 if the values are float64.
    """
    dtype, width = wide_dtype(value), value.shape[-1]
    keys = key.shape[-1]
    plan = _plan(run_lengths(starts, context), rows, value.device)
    initial = None
    if context.size > 1:
        # The K added columns of the state become M, next to U in the first V columns.
        identity = torch.eye(keys, dtype=dtype, device=value.device).expand(1, value.shape[1], keys, keys)
        initial = F.pad(identity, (width, 0))
        value = F.pad(value, (0, keys))
    # In empty slots, log decay and step size are 0, so they neither decay the state nor write to it.
    query, key, value = (plan.in_chunks(tensor.to(dtype)) for tensor in (query * keys**-0.5, key, value))
    log_decay, step_size = (plan.in_chunks(tensor.to(dtype), fill=0) for tensor in (log_decay, step_size))
    outputs, states = _scan(query, key, value, log_decay, step_size, initial, plan)
    if context.size > 1:
        entering = _entering_states(states, width, context)
        # Outputs are linear in the state before the run, so its contribution can be added afterwards.
        outputs = outputs[..., :width] + outputs[..., width:] @ entering.index_select(0, plan.run_of_chunk)
        states = states[..., :width] + states[..., width:] @ entering
    return plan.in_tokens(outputs), states


def _scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step_size: torch.Tensor,
    initial: torch.Tensor | None,
    plan: _Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of chunks, [n, G, C, V], and the states after each run, [R, G, K, V].

    Args:
        query, key: [n, H, C, K].
        value: [n, G, C, V].
        log_decay, step_size: [n, G, C].
        initial: [1, G, K, V], the state before each run; None for zero, which first chunks do not read.
        plan: the assignment of runs to chunks.
    """
    group, size, heads = value.shape[1] // key.shape[1], value.shape[2], value.shape[1]
    decay = log_decay.cumsum(-1)
    causal = torch.ones(size, size, dtype=torch.bool, device=value.device).tril()
    # Mask before the exponential, which would overflow above the diagonal.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()

    def of_heads(of_keys: torch.Tensor, by_head: torch.Tensor) -> torch.Tensor:
        """Multiply tensors of key heads [n, H, ...] with tensors of their value heads [n, G, ...]."""
        return (of_keys.unsqueeze(2) * by_head.unflatten(1, (-1, group))).flatten(1, 2)

    system = of_heads(key @ key.mT, between * step_size.unsqueeze(-1))
    inside = of_heads(query @ key.mT, between)
    since_start, until_end = decay.exp(), (decay[..., -1:] - decay).exp()
    compiled = kernels("gated_delta_kernels", "MEGARL_GATED_DELTA_KERNEL", value.device.type)
    # The kernels compute in float32. float64, the reference of tests, takes the loop below.
    if compiled is not None and value.dtype == torch.float32:
        reads_of_all = of_heads(key, (step_size * since_start).unsqueeze(-1))
        # Solve all systems at once, for the values and for the factors of the state.
        given = torch.cat((value * step_size.unsqueeze(-1), reads_of_all), dim=-1)
        solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
        states_before, corrections_of_all, states = compiled.passage(
            *solved.split([value.shape[-1], key.shape[-1]], dim=-1),
            of_heads(key, until_end.unsqueeze(-1)).mT,
            since_start[..., -1],
            initial,
            plan.first_chunks,
            plan.chunks_of_run,
        )
        asked = of_heads(query, since_start.unsqueeze(-1))
        return asked @ states_before + inside @ corrections_of_all, states.index_select(0, plan.place_of_run)
    steps = [heads * going for going in plan.going]
    # Without an initial state, the first chunks (one per run) read no state.
    fresh = plan.runs if initial is None else 0
    by_step = zip(
        system.flatten(0, 1).split(steps),
        (value * step_size.unsqueeze(-1)).flatten(0, 1).split(steps),
        of_heads(key, until_end.unsqueeze(-1)).mT.flatten(0, 1).split(steps),
        strict=True,
    )
    behind = steps[1:] if fresh else steps
    reads = iter(
        of_heads(key[fresh:], (step_size * since_start)[fresh:].unsqueeze(-1)).flatten(0, 1).split(behind)
    )
    keeps = iter(since_start[fresh:, :, -1, None, None].flatten(0, 1).split(behind))
    # Step i computes chunk i of all runs together. There are as many steps as the longest run has chunks.
    state = None if initial is None else initial.expand(plan.runs, *initial.shape[1:]).flatten(0, 1)
    before, corrections, ended = [], [], []
    for triangle, wanted, written in by_step:
        if state is None:
            rest = wanted
        else:
            if len(triangle) < len(state):
                # Runs are sorted by length in descending order, so the runs that have ended are at the back.
                ended.append(state[len(triangle) :])
                state = state[: len(triangle)]
            before.append(state)
            rest = torch.baddbmm(wanted, next(reads), state, alpha=-1)
        # solve_triangular reads only what is below the diagonal.
        correction = torch.linalg.solve_triangular(triangle, rest, upper=False, unitriangular=True)
        corrections.append(correction)
        state = (
            written @ correction if state is None else torch.baddbmm(next(keeps) * state, written, correction)
        )
    assert state is not None, "there is no run without a chunk"
    ended.append(state)
    inside = inside.flatten(0, 1)
    outputs = [inside[: heads * fresh] @ corrections.pop(0)] if fresh else []
    if before:
        asked = of_heads(query[fresh:], since_start[fresh:].unsqueeze(-1)).flatten(0, 1)
        outputs.append(
            torch.baddbmm(asked @ torch.cat(before), inside[heads * fresh :], torch.cat(corrections))
        )
    states = torch.cat(ended[::-1]).unflatten(0, (plan.runs, heads))
    return torch.cat(outputs).unflatten(0, (-1, heads)), states.index_select(0, plan.place_of_run)


def _entering_states(states: torch.Tensor, width: int, context: ContextShare) -> torch.Tensor:
    """Compute the state before each run of this rank, [R, G, K, V].

    Args:
        states: [R, G, K, V + K], U and M of each run, concatenated.
        width: V.
        context: the context-parallel ranks that share every sequence.
    """
    chunks = 2 * context.size
    starts = tuple(range(0, len(states) * context.size + 1, chunks))
    # The backward pass of gather_shared sums over ranks. This is needed, because a run's state enters the
    # later runs on all ranks.
    whole = gather_shared(states, starts, context).unflatten(0, (-1, chunks))
    # The first run of a sequence begins with a zero state.
    state = torch.zeros_like(whole[:, 0, ..., :width])
    entering = [state]
    # Every rank computes all runs: 2 * size small matmuls take less time than passing a state from rank to
    # rank.
    for run in whole[:, :-1].unbind(1):
        state = run[..., :width] + run[..., width:] @ state
        entering.append(state)
    return torch.stack((entering[context.rank], entering[chunks - 1 - context.rank]), dim=1).flatten(0, 1)


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step_size: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output and the state after one more token of each row.

    Args:
        query, key: [b, H, K], as in ``gated_delta_rule``.
        value: [b, G, V].
        log_decay, step_size: [b, G].
        state: [b, G, K, V] in float32 or wider.

    Returns:
        Output [b, G, V] and new state [b, G, K, V] in the dtype of ``state``.
    """
    dtype, group = state.dtype, value.shape[1] // key.shape[1]
    query, key = (
        (heads.to(dtype)).repeat_interleave(group, dim=1).unsqueeze(-2)
        for heads in (query * key.shape[-1] ** -0.5, key)
    )
    # Decay the state first: the correction is computed from what the decayed state returns for the key.
    kept = log_decay.to(dtype).exp()[..., None, None] * state
    correction = step_size.to(dtype)[..., None, None] * (value.to(dtype).unsqueeze(-2) - key @ kept)
    state = kept + key.mT @ correction
    return (query @ state).squeeze(-2), state


def causal_convolution(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    starts: tuple[int, ...],
    context: ContextShare = ALONE,
    rows: int = 1,
) -> torch.Tensor:
    """Convolve each channel over the last ``W`` tokens of the token's own sequence. Differentiable.
    Collective over context-parallel ranks.

    Args:
        inputs: [t, channels], this context-parallel rank's shard.
        weight: [channels, W]; the last column applies to the token itself.
        starts, context, rows: as in ``gated_delta_rule``.

    Returns:
        [t, channels].
    """
    plan = _tail_plan(starts, context.rank, context.size, weight.shape[1], rows, inputs.device)
    earlier = None
    if context.size > 1:
        tails = gather_shared(inputs.index_select(0, plan.tails), plan.starts, context)
        earlier = F.pad(tails, (0, 0, 1, 0)).index_select(0, plan.earlier)
    convolved: torch.Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        inputs, weight, earlier, plan
    )
    return convolved


CACHED_ROWS = 32
"""Rows of a convolution that a CPU computes at a time. This number fits into its cache."""


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each block of rows that is computed at a time: all rows on a GPU,
    ``CACHED_ROWS`` on a CPU."""
    size = len(tensor) if tensor.is_cuda else CACHED_ROWS
    return ((start, min(start + size, len(tensor))) for start in range(0, len(tensor), size))


class _Convolution(torch.autograd.Function):
    """Convolution of inputs [t, channels] with weights [channels, W] to [t, channels].

    ``earlier`` [R (W - 1), channels] are the tokens before each run; None for zeros. The backward pass is
    written by hand, because torch's would allocate a gradient of full size for each of the W shifted slices.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, earlier: torch.Tensor | None, plan: _TailPlan
    ) -> torch.Tensor:
        # With W - 1 positions in front of each run, one shifted multiplication per column serves all runs.
        laid = inputs.new_empty(len(inputs) + len(plan.fronts), inputs.shape[1])
        laid.index_copy_(0, plan.places, inputs)
        if earlier is None:
            laid.index_fill_(0, plan.fronts, 0)
        else:
            laid.index_copy_(0, plan.fronts, earlier)
        ctx.save_for_backward(laid, weight)
        ctx.plan, ctx.has_earlier = plan, earlier is not None
        *others, own = weight.t().contiguous()
        reach = len(others)
        convolved = torch.empty_like(laid[reach:])
        for start, end in _blocks(convolved):
            torch.mul(laid[start + reach : end + reach], own, out=convolved[start:end])
            for column, factors in enumerate(others):
                convolved[start:end].addcmul_(laid[start + column : end + column], factors)
        return convolved.index_select(0, plan.places - reach)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (laid, weight), plan = ctx.saved_tensors, ctx.plan
        factors = weight.t().contiguous()
        reach = len(factors) - 1
        # Positions in front of a run and behind the last one have no output, so their gradient is 0.
        gradient = laid.new_empty(len(laid) + reach, laid.shape[1])
        gradient.index_copy_(0, plan.places, gradients[0])
        gradient.index_fill_(0, plan.fronts, 0)
        gradient[len(laid) :] = 0
        of_laid, of_factors = torch.zeros_like(laid), torch.zeros_like(factors)
        for start, end in _blocks(laid):
            for column, later in enumerate(range(reach, -1, -1)):
                reached = gradient[start + later : end + later]
                of_laid[start:end].addcmul_(reached, factors[column])
                of_factors[column] += (laid[start:end] * reached).sum(0)
        of_earlier = of_laid.index_select(0, plan.fronts) if ctx.has_earlier else None
        return of_laid.index_select(0, plan.places), of_factors.t(), of_earlier, None


def _alternating(tokens: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Convert token indices from sequence-by-sequence order to interleaved order. There are ``count`` tokens
    in ``rows`` sequences."""
    length = count // rows
    return tokens % length * rows + tokens // length


def run_lengths(starts: tuple[int, ...], context: ContextShare) -> tuple[int, ...]:
    """Return the lengths of the runs on this context-parallel rank, in order."""
    runs = itertools.chain.from_iterable(itertools.starmap(context.chunks, itertools.pairwise(starts)))
    return tuple(end - start for start, end in runs)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Assignment of runs to chunks, in steps: step i computes chunk i of every run that has one. Chunks are
    ordered by step, and within a step by run length, the longest run first.

    A slot is a token position in a chunk. The last chunk of a run may have empty slots.

    Attributes:
        runs: R.
        going: for each step, the number of runs that have a chunk in it.
        slots: [n * C] int64, the token in each slot; arbitrary for an empty slot.
        is_token: [n * C, 1] bool, False for an empty slot; None if no slot is empty.
        places: [t] int64, the slot of each token.
        run_of_chunk: [n] int64, the run of each chunk.
        place_of_run: [R] int64, the rank of each run when sorted by length.
        first_chunks: int32, the index of each step's first chunk.
        chunks_of_run: [R] int32, number of chunks of each run, sorted by length.
    """

    runs: int
    going: tuple[int, ...]
    slots: torch.Tensor
    is_token: torch.Tensor | None
    places: torch.Tensor
    run_of_chunk: torch.Tensor
    place_of_run: torch.Tensor
    first_chunks: torch.Tensor
    chunks_of_run: torch.Tensor

    def in_chunks(self, tokens: torch.Tensor, fill: int | None = None) -> torch.Tensor:
        """Rearrange [t, heads, ...] into [n, heads, C, ...]. Empty slots are set to ``fill``, or to arbitrary
        values if ``fill`` is None."""
        laid = tokens.index_select(0, self.slots)
        if fill is not None and self.is_token is not None:
            laid = laid.masked_fill(~self.is_token, fill)
        return laid.unflatten(0, (len(self.run_of_chunk), -1)).transpose(1, 2).contiguous()

    def in_tokens(self, chunks: torch.Tensor) -> torch.Tensor:
        """Rearrange [n, heads, C, ...] into [t, heads, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


# Cached, because all layers of a micro-batch use the same plan.
@lru_cache(maxsize=32)
def _plan(lengths: tuple[int, ...], rows: int, device: torch.device) -> _Plan:
    # If all runs are shorter than CHUNK, larger chunks would only contain padding.
    size = min(CHUNK, max(lengths))
    counts = [-(-length // size) for length in lengths]
    begins = [0, *itertools.accumulate(lengths)]
    # Sort runs by length in descending order: runs then end at the back, which leaves no gaps in the batched
    # matmuls.
    order = sorted(range(len(lengths)), key=lambda run: -counts[run])
    going = tuple(sum(count > step for count in counts) for step in range(max(counts)))
    runs_of_slots, step_of_slots = [], []
    for step, going_now in enumerate(going):
        runs_of_slots += order[:going_now]
        step_of_slots += [step] * going_now
    runs = torch.tensor(runs_of_slots)
    column = torch.tensor(step_of_slots)[:, None] * size + torch.arange(size)
    is_token = (column < torch.tensor(lengths)[runs, None]).flatten()
    tokens = _alternating((torch.tensor(begins)[runs, None] + column).flatten(), begins[-1], rows)
    # Empty slots get token 0. Its values have no effect there, because the gates of empty slots are 0.
    slots = torch.where(is_token, tokens, 0)
    places = torch.empty(begins[-1], dtype=torch.int64)
    places[slots[is_token]] = torch.arange(len(slots))[is_token]
    first_chunks = torch.tensor([0, *itertools.accumulate(going[:-1])], dtype=torch.int32)
    chunks_of_run = torch.tensor([counts[run] for run in order], dtype=torch.int32)
    of_runs = (runs, torch.tensor(order).argsort(), first_chunks, chunks_of_run)
    slots, places, filled, *sent = (
        sent_to(tensor, device) for tensor in (slots, places, is_token[:, None], *of_runs)
    )
    return _Plan(len(lengths), going, slots, None if bool(is_token.all()) else filled, places, *sent)


@dataclass(frozen=True, slots=True)
class _TailPlan:
    """Indices for a convolution's inputs before each run. In the padded layout, W - 1 rows for these inputs
    precede each run.

    Attributes:
        tails: [tokens] int64, the last tokens of each run of this rank, which a run on another rank may need.
        starts: first token of each sequence in the concatenated tails of all ranks.
        earlier: [R (W - 1)] int64, the tokens before each run: 0 for a zero, i + 1 for tail i of all ranks'
            tails.
        fronts: [R (W - 1)] int64, the rows of these tokens in the padded layout.
        places: [t] int64, the row of each token in the padded layout.
    """

    tails: torch.Tensor
    starts: tuple[int, ...]
    earlier: torch.Tensor
    fronts: torch.Tensor
    places: torch.Tensor


@lru_cache(maxsize=32)
def _tail_plan(
    starts: tuple[int, ...], rank: int, size: int, width: int, rows: int, device: torch.device
) -> _TailPlan:
    context, reach = ContextShare(rank, size), width - 1
    # If a run is shorter than the reach of the convolution, all of it is tail.
    kept = []
    for start, end in itertools.pairwise(starts):
        first, last = context.chunks(start, end)[0]
        kept.append(min(reach, last - first))
    # With context parallelism a sequence has 2 * size chunks, each of which may need the tail of the chunk
    # before.
    per_sequence = 1 if context.size == 1 else 2 * context.size
    tail_starts = (0, *itertools.accumulate(per_sequence * count for count in kept))
    of_runs = (0,) if context.size == 1 else (context.rank, per_sequence - 1 - context.rank)
    tails, earlier, fronts, places, begin, laid = [], [], [], [], 0, 0
    count = starts[-1] // size
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        for chunk, (first, last) in zip(of_runs, context.chunks(start, end), strict=True):
            length = last - first
            tails.append(
                _alternating(torch.arange(begin + length - kept[sequence], begin + length), count, rows)
            )
            before = torch.arange(chunk * kept[sequence] - reach, chunk * kept[sequence])
            # No token precedes the first chunk: index 0 selects the zero that is padded in front of the
            # tails.
            earlier.append(torch.where(before < 0, 0, 1 + tail_starts[sequence] + before))
            fronts.append(torch.arange(laid, laid + reach))
            places.append(torch.arange(laid + reach, laid + reach + length))
            begin, laid = begin + length, laid + reach + length
    alternating = torch.cat(places).unflatten(0, (rows, -1)).t().flatten()
    joined = [sent_to(tensor, device) for tensor in (*map(torch.cat, (tails, earlier, fronts)), alternating)]
    return _TailPlan(joined[0], tail_starts, *joined[1:])
