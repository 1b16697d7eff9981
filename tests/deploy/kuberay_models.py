"""The fields of KubeRay's v1 objects that are written in deploy/kuberay; any other is refused.

Pod templates inside are checked against Kubernetes' own schema, so they are plain data here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=47)
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: dict[str, Any]
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    enableIngress: bool | None = None


class WorkerGroup(Strict):
    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int = Field(ge=0)
    numOfHosts: int = 1
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class AuthOptions(Strict):
    mode: Literal["disabled", "token"]


class ClusterSpec(Strict):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: bool | None = None


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class SubmitterConfig(Strict):
    backoffLimit: int = Field(ge=0)


class JobSpec(Strict):
    """With a selector the operator refuses `backoffLimit`, `suspend` and a shutdown at the end."""

    clusterSelector: dict[str, str]
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode"] = "K8sJobMode"
    activeDeadlineSeconds: int = Field(gt=0)
    submitterConfig: SubmitterConfig
    submitterPodTemplate: dict[str, Any]


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec
