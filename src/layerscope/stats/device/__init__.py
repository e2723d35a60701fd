"""The numbers of `summarize`, made on the GPU that holds the tensor, in one pass; the host does not wait (Triton).

    slots = Slots(device, "full", stream)          # room for the numbers of several tensors
    start = slots.starting(tensor.dtype)
    start(0, tensor.data_ptr(), tensor.numel())    # one launch on the model's stream
    buffer = slots.buffer(1)
    slots.gather(buffer)                            # one more, for all of them, straight to the host
    Results.read(buffer)[0].summary("bfloat16", (4, 8))          # once the device has written it

Counts, extremes, fingerprints and sketch are those of the CPU to the last bit. Each program of the launch adds up the
distance from a mean it has scouted, floats of up to 32 bits eight or four at a time in float32 and these sums in
float64, and Chan's formula joins the programs: mean (relative to the mean magnitude), std, l1 and l2 are within 2e-7 of
the CPU's, and within 1e-9 for every other dtype.
"""

from layerscope.stats.device.channels import ChannelSums, Laid, prepare_channels
from layerscope.stats.device.decoded import Numbers, Results
from layerscope.stats.device.slots import KINDS, MOST, Level, ResultBuffer, Slots, Start, StartAll, prepare, takes

__all__ = [
    "KINDS",
    "MOST",
    "ChannelSums",
    "Laid",
    "Level",
    "Numbers",
    "ResultBuffer",
    "Results",
    "Slots",
    "Start",
    "StartAll",
    "prepare",
    "prepare_channels",
    "takes",
]  # fmt: skip
