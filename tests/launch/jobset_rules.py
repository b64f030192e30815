"""Whether a JobSet is one that Kubernetes takes: by the fields of `jobset_rules.yaml`, and by what
the API server and JobSet's webhook check beyond the fields."""

import re
from collections import Counter
from pathlib import Path

import yaml

RULES = yaml.safe_load(Path(__file__).with_name("jobset_rules.yaml").read_text())
SCALARS = {"string": str, "boolean": bool, "integer": int}


def problems(jobset):
    """What is wrong with a JobSet, one line each; an empty list if nothing is."""
    return [*wrong_fields(jobset, "JobSet", "jobset")] or [*wrong_together(jobset)]


def wrong_fields(value, kind, path):
    if isinstance(kind, dict):
        yield from wrong_mapping(value, kind, path)
    elif kind in RULES:
        yield from wrong_fields(value, RULES[kind], path)
    elif kind[0] in "[{":
        container = {"[": list, "{": dict}[kind[0]]
        if not isinstance(value, container):
            yield f"{path}: {value!r} is no {container.__name__}"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from wrong_fields(item, kind[1:-1], f"{path}.{key}")
    elif not is_scalar(value, kind):
        yield f"{path}: {value!r} is not {kind}"


def wrong_mapping(value, fields, path):
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is no mapping"
        return
    known = {name.rstrip("!"): kind for name, kind in fields.items()}
    for name in value.keys() - known.keys():
        yield f"{path}: there is no field {name}"
    for name in fields:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{path}: {name[:-1]} is missing"
    for name in value.keys() & known.keys():
        yield from wrong_fields(value[name], known[name], f"{path}.{name}")


def is_scalar(value, kind):
    if kind in SCALARS:
        return type(value) is SCALARS[kind]
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", kind):
        return type(value) is int and int(bounds[1]) <= value <= int(bounds[2])
    if kind[0] == "/":
        text = str(value) if type(value) is int and "[0-9]" in kind else value  # a quantity
        return isinstance(text, str) and re.fullmatch(kind[1:-1], text) is not None
    return value in filter(None, kind.split("|"))


def wrong_together(jobset):
    """What the API server and the webhook check of several fields."""
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        last = f"{replicated['replicas'] - 1}-{job['parallelism'] - 1}-abcde"  # a random end
        hostname = f"{jobset['metadata']['name']}-{replicated['name']}-{last}"
        if len(hostname) > 63:
            yield f"a pod would be called {hostname}"
        pod = job["template"]["spec"]
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        if pod.get("restartPolicy") != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
        for rule in job["podFailurePolicy"]["rules"]:
            if rule["onExitCodes"]["containerName"] not in names(containers):
                yield "the rule is of no container"
        if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
            yield "a pod on the host's network does not find the others by name"
        volumes = names(pod["volumes"])
        yield from doubles(volumes)
        for container in containers:
            yield from doubles(names(container.get("env", [])))
            mounts = container.get("volumeMounts", [])
            yield from doubles([mount["mountPath"] for mount in mounts])
            for name in set(names(mounts)) - set(volumes):
                yield f"no volume is called {name}"


TYPES = {"object": dict, "array": list} | SCALARS


def wrong_by_schema(value, schema, path="jobset"):
    """What is wrong with a value by the OpenAPI schema of a CRD, whose unknown fields are refused;
    rules in CEL are left out."""
    if schema.get("x-kubernetes-int-or-string"):
        if type(value) not in (int, str):
            yield f"{path}: {value!r} is no quantity"
    elif type(value) is not TYPES[schema["type"]]:
        yield f"{path}: {value!r} is no {schema['type']}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from wrong_by_schema(item, schema["items"], f"{path}.{index}")
    elif isinstance(value, dict):
        for name in set(schema.get("required", [])) - value.keys():
            yield f"{path}: {name} is missing"
        known = schema.get("properties", {})
        if not known and "additionalProperties" not in schema:  # metadata, which Kubernetes knows
            return
        for name, item in value.items():
            if own := known.get(name, schema.get("additionalProperties")):
                yield from wrong_by_schema(item, own, f"{path}.{name}")
            else:
                yield f"{path}: there is no field {name}"
    elif value not in schema.get("enum", [value]) or (
        type(value) is int and value < schema.get("minimum", value)
    ):
        yield f"{path}: {value!r} is not allowed"


def names(items):
    return [item["name"] for item in items]


def doubles(values):
    return [f"{value} is there {n} times" for value, n in Counter(values).items() if n > 1]
