"""Workers that make no runs: a service whose latency is a function of its load."""

from __future__ import annotations

from foredraft.planning.trial import Trial


class Linear:
    """Workers whose service has a p99 TPOT that rises with the load of an engine."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        job = self.jobs.pop()
        engines = job.settings["hardware.replicas"]
        share = job.settings["workload.rate"] / engines / (8 - 0.2 * job.settings["speculation.steps"])
        summary = dict.fromkeys(("refused", "aborted", "failed", "unfinished", "retractions", "max_queue_length"), 0)
        summary |= {"overloaded": False, "saturation": 0.5, "replicas": engines, "mean_running": 6.0 * engines}
        summary |= {"p99_tpot_ms": 50 * share**2, "mean_tpot_ms": 10.0, "mean_ttft_ms": 100.0}
        summary |= {"mean_output_tokens": 200.0, "mean_input_tokens": 500.0, "decode_rounds": 9, "duration": 9.0}
        return job, Trial("done", "", summary | {"kv_occupancy_max": 0.5, "device_busy_share": 0.5})

    def close(self) -> None:
        pass
