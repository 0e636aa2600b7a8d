"""A GPU without a GPU: a pretend CUDA device with real values, for checking the CUDA path on a CPU-only machine.

    with pretend("A100-40GB") as gpu:
        x = torch.randn(3, 4, device="cuda")      # a CPU tensor inside, "cuda:0" outside
        x + torch.ones(4)                         # RuntimeError: expected all tensors on one device
        x.sum().item(); gpu.syncs                 # ["_local_scalar_dense"]: the host waited

It holds the course's code to the rules of the device, which is where most faults on a GPU come from:

- tensors of two devices do not meet in one operator, a generator belongs to its device, numpy reads host memory only;
- every wait of the host is counted with its reason (`gpu.syncs`), every operator as a launch (`gpu.launches`);
- while a graph is captured, nothing is computed: waits, copies between host and device, and work on host tensors raise,
  and what was captured holds NaN until it is replayed. Memory that was freed since then is refused at replay;
- an event is not ready until something has waited behind it, and then tells launches apart, one microsecond each;
- `memory_allocated` and its peak count the storages of live tensors, and a full card raises OutOfMemoryError;
- a card has its own memory, capability and formats (`CARDS`).

What it cannot show: how fast anything is; races between streams, which here run in the order of issue, and host memory
read before a non-blocking copy has filled it; the numerics and the alignment rules of CUDA's kernels, since the CPU's
compute the values; what torch.compile generates (it hands the function back) or Triton compiles (it interprets);
workspaces inside a kernel, and a graph's private pool, in `memory_allocated`. Only one device, and only the thread that
opened it.
"""

from pretend_gpu.card import CARDS, Card
from pretend_gpu.gpu import Gpu
from pretend_gpu.patches import pretend

__all__ = ["CARDS", "Card", "Gpu", "pretend"]
