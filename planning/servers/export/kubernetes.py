"""Kubernetes files of a deployment: the values of llm-d's chart, and Deployments with the files of their servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ....sim.assembly import Assembly
from .arguments import Arguments

GIB = 1 << 30
APP, FILES, MOUNT = "llm", "llm-files", "/etc/llm"
SHARED_MEMORY = "shm"
STARTS_WITHIN = {"periodSeconds": 10, "failureThreshold": 180}
"""How long a server may load weights, compile and capture graphs: half an hour, after which it is started anew."""
TOKEN = {
    "name": "HF_TOKEN",
    "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}},
}
BOOTSTRAP = {"sglang.ai/bootstrap-port": "8998"}
"""Tells SGLang's router where a prefill server takes connections of decode servers (its default port)."""


def maker_of(run: Assembly) -> str:
    """Return who makes the GPU: "amd" or "nvidia"."""
    return "amd" if run.deployment.gpu.name.startswith("MI") else "nvidia"


def yaml_text(documents: Sequence[Mapping[str, Any]], about: Sequence[str]) -> str:
    """Return documents as YAML below comments."""
    comments = "".join(f"# {line}\n" for line in about)
    return comments + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes a value each time that it occurs: an alias is hard to read, and `--from-…` refuses it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True)
class Pods:
    """What Kubernetes files say of the servers of a deployment.

    Attributes:
        run: The deployment.
        model: The model as the server takes it.
        command: The words of the command up to the model.
        devices: The arguments for the devices.
        made: The other arguments.
        image: The image of a container.
        port: Where a server listens.
        has_replicas: Whether the number of servers is known; where it is not, their default is left.
    """

    run: Assembly
    model: str
    command: Sequence[str]
    devices: Sequence[str]
    made: Arguments
    image: str
    port: int
    has_replicas: bool

    @property
    def _gpu_maker(self) -> str:
        return maker_of(self.run)

    @property
    def to_do(self) -> list[str]:
        """What the files leave to those who apply them."""
        gpu, maker = self.run.deployment.gpu.name, self._gpu_maker
        label = "amd.com/gpu.product-name" if maker == "amd" else "nvidia.com/gpu.product"
        return [
            f"add a nodeSelector with the value that {label} has on your nodes with {gpu}",
            "for a gated model create the secret hf-token with its token: kubectl create secret generic hf-token "
            "--from-literal=token=…",
        ]

    @property
    def _memory(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The volume for the memory that processes of several devices share, and its mount; none for one device. What
        a container has without it, 64 MB, is too little for their collectives."""
        if self.run.scenario.hardware.devices == 1:
            return [], []
        volume = {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}
        return [volume], [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]

    @property
    def _roles(self) -> dict[str, int]:
        """The replicas of each role."""
        pools = self.run.pools
        if not pools.is_disaggregated:
            return {"": pools.num_engines}
        return {"prefill": pools.num_prefill, "decode": pools.num_decode}

    def llm_d(self) -> dict[str, Any]:
        """Return values of the chart llm-d-modelservice, which adds the model and the parallelism to the arguments."""
        hardware, roles = self.run.scenario.hardware, self._roles
        decode, prefill = roles.get("decode", roles.get("", 0)), roles.get("prefill", 0)
        parallelism = {"tensor": hardware.tensor_parallel, "data": hardware.attention_data_parallel}
        flags = [word for word in self.devices if word == "--enable-expert-parallel"]
        container = {
            "name": "vllm",
            "image": self.image,
            "modelCommand": "vllmServe",
            "args": [*flags, *self.made.words],
            "ports": [{"containerPort": self.port}],
            "startupProbe": {"httpGet": {"path": "/health", "port": self.port}, **STARTS_WITHIN},
            "env": [TOKEN],
        }
        volumes, mounts = self._memory
        container |= {"volumeMounts": mounts} if mounts else {}
        pods: dict[str, Any] = {"parallelism": parallelism, "containers": [container | {"mountModelVolume": True}]}
        pods |= {"volumes": volumes} if volumes else {}
        artifacts = {"name": self.model, "uri": f"hf://{self.model}"}
        if self.run.memory is not None:  # of the volume for the weights, a quarter more than these
            weights = self.run.memory.target_weights_bytes * hardware.devices
            artifacts["size"] = f"{-(-weights * 5 // (4 * GIB))}Gi"
        return {
            "multinode": hardware.devices > (hardware.gpus_per_node or 8),
            "modelArtifacts": artifacts,
            "accelerator": {"type": self._gpu_maker},
            "routing": {"proxy": {"enabled": bool(prefill)}},
            "decode": {"create": True, **self._count(decode), **pods},
            "prefill": {"create": bool(prefill), **self._count(prefill), **(pods if prefill else {})},
        }

    def deployments(self) -> list[dict[str, Any]]:
        """Return a Deployment for each role, behind a ConfigMap with the files that the arguments name."""
        files = dict(self.made.files)
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": FILES}, "data": files}
        return [*([config] if files else []), *(self._deployment(role, count) for role, count in self._roles.items())]

    def _deployment(self, role: str, replicas: int) -> dict[str, Any]:
        name = f"{APP}-{role}" if role else APP
        label = {"app": APP} | ({"role": role} if role else {})
        container: dict[str, Any] = {
            "name": self.command[0] if self.command[0] != "python3" else "sglang",
            "image": self.image,
            "command": [*self.command, self.model],
            "args": [*self._arguments(role), "--host", "0.0.0.0", "--port", str(self.port)],
            "ports": [{"containerPort": self.port}],
            "env": [TOKEN, *({"name": name, "value": value} for name, value in self.made.environment.items())],
            "startupProbe": {"httpGet": {"path": "/health", "port": self.port}, **STARTS_WITHIN},
            "readinessProbe": {"httpGet": {"path": "/health", "port": self.port}},
            "resources": {"limits": {f"{self._gpu_maker}.com/gpu": self.run.scenario.hardware.devices}},
        }
        pod: dict[str, Any] = {"containers": [container]}
        volumes, mounts = self._memory
        if self.made.files:
            mounts = [{"name": FILES, "mountPath": MOUNT}, *mounts]
            volumes = [{"name": FILES, "configMap": {"name": FILES}}, *volumes]
        if volumes:
            container["volumeMounts"], pod["volumes"] = mounts, volumes
        metadata: dict[str, Any] = {"labels": label} | ({"annotations": BOOTSTRAP} if role == "prefill" else {})
        template = {"metadata": metadata, "spec": pod}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": label},
            "spec": {**self._count(replicas), "selector": {"matchLabels": label}, "template": template},
        }

    def _count(self, replicas: int) -> dict[str, int]:
        return {"replicas": replicas} if self.has_replicas else {}

    def _arguments(self, role: str) -> list[str]:
        words = [*self.devices, *self.made.words, *self.made.of_role.get(role, ())]
        return [f"{MOUNT}/{word}" if word in self.made.files else word for word in words]
