"""Passes over a built model that make it faster or smaller; its results change by rounding at most.

Each pass replaces modules in their parents by twins that share their parameters and names, so that checkpoints are the
same with any passes. Examples of a Conformer's modules (plain class -> twin):

    Encoder -> PackedEncoder                                   packing.py
    ConformerBlock, FeedForward -> FusedConformerBlock, FusedFeedForward     fused.py
    DepthwiseConv -> SpanwiseDepthwiseConv -> FastDepthwiseConv    packing.py, products.py
    Subsampling -> ChunkedSubsampling, HeadLosses -> ChunkedLosses   chunks.py
    Linear -> FastLinear                                       products.py
    Dropout -> MaskedDropout                                   fused.py

Recomputation (`RecomputePolicy` in memory/plan.py, `run_recomputed` in recompute.py) and offloading (memory/weights.py)
are runners around the blocks: `ForwardPass` passes them to the model as `wrap_block`.

A new pass needs twins of the classes that it replaces, a field in `Passes`, False in `NO_PASSES` and its place in
`optimize`. `replace_modules` matches exact classes, so a later pass must also replace the twins of earlier ones. A case
in tests/invariants/test_passes_change_nothing.py compares it with the plain model.
"""

import dataclasses
from dataclasses import dataclass

from konkanivani.models.asr import KonkaniVaniASR, SpeechNetwork
from konkanivani.models.conformer import Dropout
from konkanivani.models.twin import replace_modules
from konkanivani.ops.chunks import ChunkedLosses, compute_in_chunks, use_chunked_attention
from konkanivani.ops.fused import MaskedDropout, fuse_blocks, fuse_norms, slice_vocabulary, use_fast_logits
from konkanivani.ops.packing import pack_encoder
from konkanivani.ops.products import use_fast_depthwise, use_fast_products
from konkanivani.ops.recompute import keep_attention


@dataclass(frozen=True)
class Passes:
    """Passes to apply, all by default; on a GPU the twins of CPU passes run PyTorch's kernels.

    An exception are 1 x 1 convolutions of `fast_products`, which are matrix products on every device.
    """

    fast_products: bool = True
    """Linear layers that keep their input before casting, by oneDNN if it is faster than MKL."""
    fused_norms: bool = True
    """Norms and activations that are recomputed with the product that follows, instead of being kept."""
    masked_dropout: bool = True
    """Dropout masks of one byte per number, and residual additions in the same pass over memory (CPU)."""
    fast_depthwise: bool = True
    """Kernel gradient of the depthwise convolution as a convolution (CPU)."""
    packing: bool = True
    """Batches without padding in the encoder's blocks (CPU)."""
    chunks: bool = True
    """Long utterances in chunks: subsampling, relative attention, CTC and cross entropy."""
    kept_attention: bool = True
    """Attention results of recomputed Whisper blocks are kept."""
    sliced_vocabulary: bool = True
    """Whisper's and T5's loss in slices of the vocabulary."""
    chunked_attention: bool = True
    """T5's attention, whose bias has a gradient, in chunks of queries."""


NO_PASSES = Passes(
    fast_products=False,
    fused_norms=False,
    masked_dropout=False,
    fast_depthwise=False,
    packing=False,
    chunks=False,
    kept_attention=False,
    sliced_vocabulary=False,
    chunked_attention=False,
)
ALL_PASSES = Passes()
ROOMY_PASSES = dataclasses.replace(ALL_PASSES, fast_products=False, fused_norms=False, sliced_vocabulary=False)
"""Passes on a GPU with memory to spare: those left out save memory there, but launch up to a third more kernels."""


def optimize(model: SpeechNetwork, passes: Passes = ALL_PASSES) -> None:
    """Apply the passes to a built model, in place; later passes replace twins of earlier ones."""
    if passes.packing:
        pack_encoder(model)
    if passes.fast_depthwise:
        use_fast_depthwise(model)
    if passes.chunks:
        compute_in_chunks(model)
        if isinstance(model, KonkaniVaniASR):
            model.losses = ChunkedLosses()
    if passes.masked_dropout:
        replace_modules(model, {Dropout: MaskedDropout})
    if passes.fused_norms:
        fuse_norms(model)
    if passes.fused_norms or passes.masked_dropout:
        fuse_blocks(model, passes.fused_norms)
    if passes.kept_attention:
        keep_attention(model)
    if passes.chunked_attention:
        use_chunked_attention(model)
    if passes.sliced_vocabulary:
        slice_vocabulary(model)
    if passes.fast_products:
        use_fast_products(model)
        use_fast_logits(model)
