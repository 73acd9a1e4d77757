"""Links with a delay between network namespaces, for kernels without netem: `step_model.py` starts it as root.

    python benchmarks/delayed_links.py 10 n1 n2 n3      # 10 ms in each direction

Each namespace gets a device `delayed0`. Packets that are routed to it arrive at the namespace of their address after
the delay, in order. A TCP stream is passed on in the kernel's large segments, so that few calls move many bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

DEVICE = "delayed0"
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_INFO, _WITH_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TCP_SEGMENTS = 0x01, 0x02
_HEADER_BYTES = 10  # virtio-net header before each packet
_LARGEST = 70_000


def open_device(namespace: str) -> int:
    """Make the device in a network namespace, and return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", encoding="ascii") as own, open(f"/run/netns/{namespace}", encoding="ascii") as there:
        assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _TUN | _NO_INFO | _WITH_HEADER
            fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", DEVICE.encode(), flags))
            fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUM | _TCP_SEGMENTS)
        finally:
            assert libc.setns(own.fileno(), 0) == 0
    subprocess.run(["ip", "-n", namespace, "link", "set", DEVICE, "up", "txqueuelen", "10000"], check=True)
    return device


def relay(devices: dict[int, int], delay_s: float) -> None:
    """Pass packets on for ever.

    Args:
        devices: File descriptor by the last byte of the address.
        delay_s: Delay of each packet.
    """
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for device in select.select(list(devices.values()), [], [], timeout_s)[0]:
            packet = os.read(device, _LARGEST)
            receiver = devices.get(packet[_HEADER_BYTES + 19])
            if receiver is not None:
                waiting.append((time.perf_counter() + delay_s, receiver, packet))
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, receiver, packet = waiting.popleft()
            os.write(receiver, packet)


def main() -> None:
    """Make the devices, print a line, and pass packets on."""
    delay_ms, *namespaces = sys.argv[1:]
    devices = {int(name.removeprefix("n")): open_device(name) for name in namespaces}
    os.nice(-20)  # a relay that waits for a core would delay packets further
    print("ready", flush=True)
    relay(devices, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
