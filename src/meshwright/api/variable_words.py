"""Environment variables of NCCL, libfabric and torch that `meshwright explain` describes."""

from __future__ import annotations

import re

from meshwright.errors import InputError, closest, unknown
from meshwright.frameworks.launch_variables import VARIABLES

ROWS: tuple[tuple[str, str], ...] = (
    # NCCL: what it prints
    ("NCCL_DEBUG", "sets what NCCL prints: INFO the network, links and channels that it uses, WARN only its errors"),
    ("NCCL_DEBUG_SUBSYS", "chooses what NCCL_DEBUG=INFO prints: INIT, NET, GRAPH, TUNING, COLL, ENV or ALL"),
    ("NCCL_DEBUG_FILE", "writes NCCL's messages to a file: nccl.%h.%p has one for each host and process"),
    # NCCL: network
    ("NCCL_IB_HCA", "names the InfiniBand or RoCE adapters that NCCL may use, such as mlx5; ibv_devinfo lists them"),
    ("NCCL_IB_GID_INDEX", "sets the index of the RoCE address that NCCL uses: that of a RoCEv2 GID on every node "
        "(show_gids), mostly 3; newer NCCL finds it itself"),
    ("NCCL_IB_TIMEOUT", "sets the time that InfiniBand waits for an answer, 4.096 µs × 2^value: 20 by default (4.3 "
        "s), 22 on large or congested networks"),
    ("NCCL_IB_RETRY_CNT", "sets how often InfiniBand sends again before NCCL fails: 7 by default, the most"),
    ("NCCL_IB_QPS_PER_CONNECTION", "sets the number of queue pairs between two ranks: 1 by default, 2 to 8 use more "
        "paths of a RoCE network"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", "splits each message over the queue pairs (1) or sends whole messages in turn (0)"),
    ("NCCL_IB_TC", "sets the traffic class of InfiniBand and RoCE packets, as the network's administrators set it up "
        "(often 106 for RoCE)"),
    ("NCCL_IB_SL", "sets the service level of InfiniBand packets, as the network's administrators set it up"),
    ("NCCL_IB_PCI_RELAXED_ORDERING", "lets adapters reorder PCIe writes, which virtual machines need for full speed: "
        "2 (NCCL decides) by default"),
    ("NCCL_IB_ADAPTIVE_ROUTING", "sends large messages so that switches may route each packet: on by default for "
        "InfiniBand, off for RoCE"),
    ("NCCL_SOCKET_FAMILY", "chooses IPv4 (AF_INET) or IPv6 (AF_INET6) for NCCL's sockets"),
    ("NCCL_SOCKET_NTHREADS", "sets the number of threads per connection over TCP; with NCCL_NSOCKS_PERTHREAD at most "
        "64 sockets. It does not matter for InfiniBand, RoCE, EFA and Slingshot"),
    ("NCCL_NSOCKS_PERTHREAD", "sets the number of sockets per thread over TCP; see NCCL_SOCKET_NTHREADS"),
    ("NCCL_NET_PLUGIN", "names the plugin of another network, libnccl-net-NAME.so: EFA and Slingshot need that of "
        "libfabric (aws-ofi-nccl). NCCL_DEBUG=INFO prints which network is used"),
    ("NCCL_NET_GDR_READ", "lets an adapter read from GPU memory when it sends: on by default with NVLink"),
    ("NCCL_DMABUF_ENABLE", "lets NCCL register GPU memory with adapters by dma-buf, in place of nvidia-peermem"),
    ("NCCL_COLLNET_ENABLE", "turns reductions in the switches (SHARP) on, if their plugin is installed: off by "
        "default"),
    # NCCL: inside a node, memory and channels
    ("NCCL_P2P_LEVEL", "sets how far GPUs may be from each other for direct access: LOC, NVL, PIX, PXB, PHB, SYS"),
    ("NCCL_NVLS_ENABLE", "turns reductions in the NVSwitches (NVLink SHARP, from Hopper on) on or off; 0 frees their "
        "buffers and works around errors at start"),
    ("NCCL_PXN_DISABLE", "keeps a GPU, if 1, from sending over the adapter of another GPU of its node"),
    ("NCCL_CUMEM_ENABLE", "lets NCCL allocate by CUDA's virtual memory functions; 0 is used as a workaround for "
        "errors at start and for memory"),
    ("NCCL_BUFFSIZE", "sets the size in bytes of each buffer between two GPUs: 4194304 by default; smaller ones free "
        "GPU memory and may be slower"),
    ("NCCL_MIN_NCHANNELS", "sets the least number of channels, each of which takes an SM and buffers; by default "
        "NCCL decides"),
    ("NCCL_MAX_NCHANNELS", "sets the largest number of channels: fewer leave more SMs to compute, and slow NCCL down"),
    ("NCCL_MIN_CTAS", "sets the least number of SMs for a collective; by default NCCL decides"),
    ("NCCL_MAX_CTAS", "sets the largest number of SMs for a collective: fewer leave more to compute"),
    ("NCCL_TOPO_FILE", "names an XML file with the PCIe topology, which virtual machines of some clouds need for "
        "full speed"),
    ("NCCL_IGNORE_CPU_AFFINITY", "lets NCCL choose the cores of its threads by the GPU alone, not by the job's"),
    ("NCCL_CHECKS_DISABLE", "turns the checks of arguments off; newer NCCL ignores it"),
    ("NCCL_TIMEOUT", "NCCL does not read. The time after which torch ends a collective is that of "
        "init_process_group(timeout=…); ddp_timeout of the Trainer, --distributed-timeout-minutes of "
        "Megatron-LM"),
    # torch
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "makes torch record the last collectives of each rank (flight recorder), which "
        "tell after a hang which rank did not come: 2000 is usual; TORCH_FR_BUFFER_SIZE in newer torch"),
    ("TORCH_FR_BUFFER_SIZE", "sets the number of collectives that torch's flight recorder keeps, which tell after a "
        "hang which rank did not come"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "makes torch write its flight recorder when a collective times out"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "sets the time after which torch's monitor ends a process whose watchdog "
        "does not answer"),
    ("TORCH_NCCL_ENABLE_MONITORING", "turns torch's monitor of NCCL's watchdog on"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", "keeps tensors of collectives alive in another way, which frees memory "
        "sooner; the default in newer torch"),
    # CUDA and processes
    ("CUDA_DEVICE_MAX_CONNECTIONS", "sets the number of hardware queues: Megatron-LM needs 1 with tensor or context "
        "parallelism before Blackwell, so that communication starts before the kernels that overlap it"),
    ("CUDA_VISIBLE_DEVICES", "lists the GPUs that a process sees; jobs of a scheduler have it set"),
    ("OMP_NUM_THREADS", "sets the number of CPU threads of a process: torchrun sets 1 where it is not set"),
    ("UCX_TLS", "chooses UCX's networks, which MPI uses; NCCL does not read it"),
    # libfabric: Slingshot and EFA
    ("FI_CXI_DEFAULT_CQ_SIZE", "sets the number of entries of Slingshot's completion queues: large jobs set 131072, "
        "as an overrun ends or hangs them"),
    ("FI_CXI_DEFAULT_TX_SIZE", "sets the number of sends that Slingshot keeps in flight: as many as a rank has peers "
        "and messages at once, such as 1024 to 16384"),
    ("FI_CXI_RX_MATCH_MODE", "chooses where Slingshot matches messages: hardware, software, or hybrid, which falls "
        "back to software when the adapter's entries are used up"),
    ("FI_CXI_RDZV_PROTO", "chooses how Slingshot sends large messages: alt_read is usual for NCCL and RCCL"),
    ("FI_CXI_RDZV_THRESHOLD", "sets the size in bytes from which the receiver fetches a message"),
    ("FI_CXI_RDZV_GET_MIN", "sets the least size in bytes that the receiver fetches; 0 is usual for NCCL and RCCL"),
    ("FI_CXI_RDZV_EAGER_SIZE", "sets the part in bytes of a large message that is sent at once; 0 is usual for NCCL "
        "and RCCL"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "keeps libfabric, if 1, from registering host memory with CUDA or HIP, which "
        "can deadlock with NCCL and RCCL"),
    ("FI_CXI_REQ_BUF_SIZE", "sets the size in bytes of each buffer of messages that Slingshot matches in software"),
    ("FI_CXI_OFLOW_BUF_SIZE", "sets the size in bytes of each buffer of messages that no receive was posted for"),
    ("FI_MR_CACHE_MONITOR", "chooses how libfabric notices freed memory: userfaultfd or kdreg2 with NCCL and RCCL, "
        "as memhooks can deadlock"),
    ("FI_EFA_USE_DEVICE_RDMA", "lets EFA, if 1, read and write GPU memory; newer libfabric does so by itself where "
        "the instance can"),
    ("FI_EFA_FORK_SAFE", "lets a process, if 1, that uses EFA fork, such as data loaders; not needed on newer kernels"),
    ("FI_LOG_LEVEL", "makes libfabric print: warn, info or debug. fi_info lists the networks that it finds"),
)  # fmt: skip
"""Name, and what it does, after "environment variable that"."""

VARIABLE_WORDS = dict(ROWS)
"""Variable → what it does."""
FAMILIES = {
    "NCCL_": ("NCCL", "its user guide has a list under Environment Variables; NCCL_DEBUG=INFO with "
              "NCCL_DEBUG_SUBSYS=ENV prints those that it reads"),
    "TORCH_NCCL_": ("torch's NCCL process group", "torch's documentation lists them under ProcessGroupNCCL"),
    "FI_": ("libfabric", "fi_info -e lists all with their meaning, fi_info -g NAME those with a word"),
    "FI_CXI_": ("libfabric's provider for Slingshot", "man fi_cxi and fi_info -g cxi list them"),
    "FI_EFA_": ("libfabric's provider for EFA", "man fi_efa and fi_info -g efa list them"),
}  # fmt: skip
"""Start of a name → whose variable it is, and where those that are not described here are listed."""
_NAME = re.compile(r"[A-Z0-9_]+")


def purpose(name: str) -> str | None:
    """Return what a variable does; where a known program's others are listed; None for the name of nothing known."""
    if name in VARIABLE_WORDS:
        return f"environment variable that {VARIABLE_WORDS[name]}"
    family = max((one for one in FAMILIES if name.startswith(one) and _NAME.fullmatch(name)), key=len, default="")
    if not family:
        return None
    if near := closest(name, (*VARIABLE_WORDS, *(one.name for one in VARIABLES))):
        reason = unknown("environment variable", name, near).reason
        raise InputError(reason, field="about", value=name, fix=tuple(f"meshwright explain {one}" for one in near))
    program, listed = FAMILIES[family]
    return f"environment variable of {program} that is not described here; {listed}"
