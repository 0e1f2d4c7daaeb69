"""A Ray Serve application: N replicas of the server, each with a model of its own.

    serve run foveakv.serving.ray_app:build model=demo method=hybridkv budget=0.1 replicas=2

or, from Python, `ray.serve.run(build({"model": "demo", "replicas": 2}))`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foveakv.errors import InputError, MissingDependencyError
from foveakv.serving.choice import Policy
from foveakv.serving.limits import Limits

try:
    from ray import serve
except ImportError as error:
    raise MissingDependencyError("replicas need Ray Serve: pip install 'foveakv[ray]'") from error

KEY_VARIABLE = "FOVEAKV_API_KEY"


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of the application; all may be given as text.

    model, name: the model, and its name in requests (default: the model). method, budget, kv_dtype: of requests that
    name none. options: of the method. replicas: their number; with max_replicas Ray adds and removes replicas between
    the two by the number of requests. gpus, cpus: of each replica. device, dtype: of the model; default: see
    `foveakv.load`. max_queue: requests that may wait in a replica. request_seconds: the longest time of a request.
    """

    model: str = "demo"
    name: str | None = None
    method: str = "hybridkv"
    budget: float | int | str | None = None
    options: Mapping[str, Any] | None = None
    kv_dtype: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    gpus: float = 0
    cpus: float = 1
    device: str | None = None
    dtype: str | None = None
    max_queue: int = 32
    request_seconds: float = 600.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ReplicaSettings:
        """Read settings from a mapping, such as the arguments of `serve run`.

        Raises:
            InputError: a setting is unknown, or a number is not one.
        """
        known = cls.__dataclass_fields__
        if unknown := [name for name in given if name not in known]:
            raise InputError(f"unknown setting {unknown[0]!r}; settings: {', '.join(known)}")
        values = dict(given)
        for kind, names in (
            (int, ("replicas", "max_replicas", "max_queue")),
            (float, ("gpus", "cpus", "request_seconds")),
        ):
            for name in names:
                try:
                    values |= {name: kind(values[name])} if values.get(name) is not None else {}
                except ValueError:
                    raise InputError(f"{name}={values[name]} is not a number") from None
        return cls(**values)

    def policy(self) -> Policy:
        """The policy of each replica."""
        from foveakv.methods import find
        from foveakv.util.values import field_types, parse_value

        options = dict(self.options or {})
        if self.budget is not None:
            if "budget" not in field_types(find(self.method)):
                raise InputError(f"{self.method} takes no budget")
            options["budget"] = parse_value("budget", float | int | str, str(self.budget))
        return Policy(self.method, options, kv_dtype=self.kv_dtype)


class Replica:
    """One replica. Ray builds its HTTP application with `application` after it was made."""

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if services and not services[-1].engine.status().alive:
            raise RuntimeError("the engine has stopped")


services: list[Any] = []
"""The service of this process."""


def application(settings: ReplicaSettings) -> Any:
    """Load the model and build the HTTP application of a replica."""
    from foveakv.models import load
    from foveakv.serving.server import build_service, create_app

    loaded = load(settings.model, device=settings.device, dtype=settings.dtype)
    limits = Limits(max_queue=settings.max_queue, request_seconds=settings.request_seconds)
    name = settings.name or settings.model
    is_demo = settings.model == "demo"
    service = build_service(loaded, name, policy=settings.policy(), limits=limits, is_demo=is_demo)
    services.append(service)
    return create_app(service, api_key=os.environ.get(KEY_VARIABLE) or None)


def build(given: Mapping[str, Any]) -> Any:
    """Build the application. given: the fields of `ReplicaSettings`.

    Raises:
        InputError, MethodError: a setting is unknown or invalid.
    """
    settings = ReplicaSettings.read(given)
    settings.policy()  # a mistake is known before any replica starts
    scale: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        automatic = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
        scale = {"autoscaling_config": {**automatic, "target_ongoing_requests": 4}}

    def build_application() -> Any:
        return application(settings)

    deployment = serve.deployment(
        name="foveakv",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        # More than the queue, so that a replica itself says 429 and Ray does not hold requests back without a bound.
        max_ongoing_requests=2 * settings.max_queue + 16,
        health_check_period_s=5,
        **scale,
    )(serve.ingress(build_application)(Replica))
    return deployment.bind()
