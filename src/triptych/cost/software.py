"""What a training program does that costs time or memory: its features, not its name.

A plan says how work is split; this says how it is executed. `TRIPTYCH` describes our own runtime;
`triptych validate` describes other programs in the same words. Each number belongs to a feature,
never to a model or a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Operators that are not products: what they move, and what the host does for them."""

    traffic: float  # bytes over those of one fused kernel per operator
    launches: float  # kernels per operator of the model
    host: float = 1.0  # host time per kernel over the device's `operator_s`
    loss_bytes: float  # moved per logit by softmax, loss and gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a program holds beside what a plan says: bytes of a rank, or per element."""

    context_bytes: float = 1.5 * GIB  # of the device's runtime, its kernels and communicators
    fragmentation: float = 0.03  # part of all tensors that the caching allocator loses
    logit_bytes: float = 0.0  # per logit of a whole micro-batch; 0: by chunks, as our loss does
    owned_bytes: float = 0.0  # per parameter that a rank updates: fp32 gradients of the update
    update_bytes: float = 0.0  # of an update of gradients summed over ranks, activations gone
    sums_apart: bool = False  # gradients are summed over ranks into tensors of their own
    split_logit_bytes: float = 0.0  # where tensor ranks share the vocabulary; 0: as many
    narrow_gradients: bool = False  # kept beside the wide ones that they are added to
    buckets: bool = True  # gradients travel in buffers of their own
    in_place: bool = False  # gradients are made in those buffers, the head's too
    stand_ins: bool = False  # products add to kept gradients; one tensor a shape for autograd
    stage_outputs: float = 0.0  # tensors more of each micro-batch that is in flight
    more_in_flight: int = 0  # micro-batches that a pipeline has memory for


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Features of a training program."""

    name: str
    eager: Kernels
    compiled: Kernels
    attention: str = "flash"  # unless the run says otherwise; eager: scores are written out
    keeps_softmax: bool = False  # of written-out scores in fp32, beside the 16-bit one
    keeps_activation: bool = True  # of an MLP; else its backward makes it again from its input
    selects_operators: bool = False  # selective: every other product and all that is cheap
    drops: bool = True  # runs dropout where a model has it
    zero: int = 0  # unless the run says otherwise
    recompute: str = "none"  # unless the run says otherwise
    context_method: str = "ring"  # of context parallelism, unless the run says otherwise
    flash: int = 0  # generation of attention kernels; 0: the second for sdpa, the third for flash
    fuses_softmax: bool = False  # of written-out scores
    splits_messages: bool = False  # tensor ranks each send a part of what a stage hands on
    message_s: float = 0.0  # of the host for a message between stages that it waits for
    hides_messages: bool = False  # between stages, behind compute of micro-batches in between
    hides_gradients: bool = True  # sums of gradients travel behind the last backward
    hides_shards: float = 0.5  # most of ZeRO-3's traffic that hides behind compute
    one_port: bool = False  # ZeRO-3's gathers use one port of a node, not all
    hides_experts: float = 0.0  # part of the exchanges with experts that hides behind compute
    hides_tensor: float = 0.0  # part of tensor-parallel exchanges that hides behind products
    gathers_entries: bool = False  # keeps its part of a region's input; backward gathers it again
    hides_entries: bool = False  # backward: those gathers, sums of gradients behind products
    fp8_rate: float = 1.0  # of fp8 products against tensor-wise scaled ones
    fp8_cast_bytes: float = 5.0  # per element of an operand: its largest value, then the cast
    exchange: float = 1.0  # rate of gradient sums against the link's
    scatter: float = 1.0  # the same where ZeRO divides gradients or parameters after them
    checkpoint_s: float = 0.0  # host time of a recomputed layer besides its operators
    compiles_all: bool = True  # the loss too, and every layer; else those of `plan/compiled.py`
    writes_plain_layers: bool = False  # and keeps of them what compiled ones do (`plan/plain.py`)
    is_fused: bool = False  # keeps and moves what compiled kernels do, compiled or not
    footprint: Footprint = Footprint()
    accumulation_bytes: float = 0.0  # per parameter and micro-batch; 0: a 16-bit read, fp32 added
    optimizer_bytes: float = 28.0  # per parameter of an update in fp32
    two_sockets: float = 1.0  # host time where tensor ranks span two sockets and wait for each

    def kernels(self, compiled: bool) -> Kernels:
        """Those of a compiled or an eager model."""
        return self.compiled if compiled else self.eager


TRIPTYCH = Software(
    name="triptych",
    compiles_all=False,
    gathers_entries=True,
    hides_entries=True,
    writes_plain_layers=True,
    # Counted kernel by kernel for a Llama layer of `transformers`: 308h against 94h bytes, about
    # 26 kernels for 11 operators.
    eager=Kernels(traffic=3.0, launches=2.4, loss_bytes=48.0),
    compiled=Kernels(traffic=1.0, launches=1.0, loss_bytes=16.0),
    footprint=Footprint(in_place=True),
)
