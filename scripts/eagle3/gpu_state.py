"""This machine's GPUs while a server on them is measured: the energy they take, their clocks and power limits."""
from __future__ import annotations

import contextlib
import functools
import socket
import time
import urllib.parse

import pynvml

# Why a GPU runs below the clock that it could; idle GPUs and clocks that somebody set are no reason here
HELD_BACK = {pynvml.nvmlClocksThrottleReasonSwPowerCap: "power limit",
             pynvml.nvmlClocksThrottleReasonHwSlowdown: "slowdown by the hardware",
             pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "temperature",
             pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "temperature, by the hardware",
             pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake"}


@functools.cache
def gpus() -> list:
    """NVML handles of this machine's GPUs; none without a driver.

    The first call can hold the GPU up for seconds: not while something is measured.
    """
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def energy(handles: list) -> float | None:
    """Joules that these GPUs have taken since the driver was loaded; None where one counts none (before Volta)."""
    try:
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000 if handles else None
    except pynvml.NVMLError:
        return None


def told(function, *given):
    """What the driver says; None where it says nothing."""
    try:
        return function(*given)
    except pynvml.NVMLError:
        return None


def look(handles: list) -> list[dict]:
    """What each GPU is, is held to, and runs at now: names, watts, MHz, degrees Celsius; None is what is not told."""
    found = []
    for handle in handles:
        name, limit = told(pynvml.nvmlDeviceGetName, handle), told(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        reasons = told(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        found.append({
            "name": name.decode() if isinstance(name, bytes) else name, "power_limit_w": limit and limit / 1000,
            "max_sm_mhz": told(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "sm_mhz": told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            "held_back_by": [why for bit, why in HELD_BACK.items() if reasons & bit]})
    return found


class Power:
    """Mean power of this machine's GPUs over a `with` block, in watts; and `state`, what `look` saw right after it.

    None and nothing where the server at `url` runs on another machine; no watts where the driver counts no energy.
    Read before and after: with `nvidia-smi` polled meanwhile a server gave 0.8 of its throughput (64 streams, H200).
    """

    def __init__(self, url: str):
        self.watts, self.gpus, self.state = None, [], []
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((urllib.parse.urlsplit(url).hostname, 0))  # only an address of this machine can be bound
            self.gpus = gpus()

    def __enter__(self) -> Power:
        self.began, self.energy = time.perf_counter(), energy(self.gpus)
        return self

    def __exit__(self, *_) -> None:
        after, ended = energy(self.gpus), time.perf_counter()
        self.state = look(self.gpus)
        if None not in (self.energy, after):
            self.watts = (after - self.energy) / (ended - self.began)
