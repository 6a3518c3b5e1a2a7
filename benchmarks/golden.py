"""Digest a fixed list of runs, so that a change of the code can be shown to leave every bit of their results alone.

    python benchmarks/golden.py compute FILE [--only PATTERN]   # run and write digests
    python benchmarks/golden.py compare BEFORE AFTER            # list equal and different runs

Each run goes through the command line in a process of its own. A digest covers the final model, the server state, the
client state and every recorded metric except times. Bits depend on the processor and on torch, so compare only files
that were computed on one machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

from fedfa.experiment.run import processor_name, source_commit

DIGITS = ["--preset", "digits-c2", "--rounds", "3"]
ALONE = ["--workers", "1", "--set", "engine.execution=each"]
PAIR = ["--workers", "2", "--set", "engine.execution=each"]
STACKED = ["--workers", "1", "--set", "engine.execution=stacked"]
RAY = ["--engine", "ray", "--set", "engine.address=local", "--workers", "2"]
BY_TIME = {"train_seconds", "cpu_seconds", "samples_per_second", "federation"}

FEDFA = ["fedfa", "fedfa@plus", "fedfa@paper", "fedfa@authors", "fedfa+fedadam", "fedfa+fedlc"]
OTHERS = [
    "fedprox", "feddyn", "fednova", "matching", "fedavgm", "fedadagrad", "fedyogi", "fedlc", "local",
    "centralised", "fedproto", "fedproc", "fedetf",
]  # fmt: skip
FEDFA_OPTIONS = {
    "layers": ["--set", 'algorithm.anchors.layers=["fc1.0","fc1"]'],
    "sample": ["--set", "algorithm.anchors.loss=sample"],
    "no-update": ["--set", "algorithm.anchors.update=false"],
    "init-etf": ["--set", "algorithm.anchors.init=etf"],
    "init-fedavg": ["--set", "algorithm.anchors.init=fedavg"],
    "before": ["--set", "algorithm.calibration.when=before"],
    "epoch": ["--set", "algorithm.calibration.when=epoch"],
    "after": ["--set", "algorithm.calibration.when=after"],
    "sgd": ["--set", "algorithm.calibration.optimiser=sgd"],
    "momentum": ["--set", "local.momentum=0.9"],
}
CNN = [
    "--preset", "fmnist-c2", "--rounds", "2", "--set", "cohort.clients=4", "--set", "local.epochs=1", "--workers", "1",
]  # fmt: skip


def runs() -> dict[str, list[str]]:
    """Arguments of ``fedfa`` by the name of the run."""
    found: dict[str, list[str]] = {}
    for method in ["fedavg", *FEDFA, "scaffold", "moon", "fedavg+ccvr", "fedfa+ccvr"]:
        base = ["run", *DIGITS, "--algorithm", method]
        found[f"{method}/1-worker"] = base + ALONE
        found[f"{method}/2-workers"] = base + PAIR
        if method not in ("fedfa@paper",):
            found[f"{method}/auto"] = base
        if method in ("fedavg", "fedfa", "fedfa@plus", "fedfa@authors", "moon"):
            found[f"{method}/stacked"] = base + STACKED
        if method in ("fedavg", "fedfa", "scaffold", "fedavg+ccvr"):
            found[f"{method}/ray"] = base + RAY
    for method in OTHERS:
        found[f"{method}/1-worker"] = ["run", *DIGITS, "--algorithm", method, *ALONE]
    for name, options in FEDFA_OPTIONS.items():
        found[f"fedfa-{name}/1-worker"] = ["run", *DIGITS, "--algorithm", "fedfa", *options, *ALONE]
    for method in ("fedavg", "fedfa", "fedfa@authors", "fedfa@paper", "scaffold", "moon", "fedavg+ccvr"):
        found[f"{method}/cnn"] = ["run", *CNN, "--algorithm", method]
    found["fedfa-diagnostics/1-worker"] = [
        "run", *DIGITS, "--algorithm", "fedfa", "--set", "diagnostics.every=1", *ALONE,
    ]  # fmt: skip
    for method in ("fedavg", "fedfa", "scaffold"):
        found[f"{method}/flower"] = [
            "flower", "up", "--preset", "digits-c2", "--rounds", "2", "--sites", "3", "--algorithm", method,
        ]  # fmt: skip
    return found


def digest(path: Path) -> str:
    """Of the tensors, and of the records, of a run directory: what must not depend on when or where it was made."""
    found, records = hashlib.blake2b(digest_size=12), hashlib.blake2b(digest_size=12)
    files = [path / "model.safetensors", path / "server.safetensors", *sorted((path / "clients").glob("*.safetensors"))]
    for file in files:
        found.update(file.name.encode())
        with safe_open(str(file), framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name)
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(value.numpy().tobytes())
    for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = {key: value for key, value in json.loads(line).items() if key not in BY_TIME}
        record["final_pass"] = bool(record.pop("survey", record.pop("final_pass", False)))
        records.update(json.dumps(record, sort_keys=True).encode())
    return f"{found.hexdigest()} {records.hexdigest()}"


def environment() -> dict[str, str]:
    """What bits depend on besides the code. Processors of one name can differ, hence the numbers of the kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    kind = "/".join(values.get(key, "?") for key in ("cpu family", "model", "stepping"))
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"processor": f"{processor_name()} {kind}", "kernels": kernels, "torch": torch.__version__}


def compute(arguments: list[str]) -> str:
    """The digest of one run, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = subprocess.run(
            [sys.executable, "-m", "fedfa", *arguments, "--out", str(out)], capture_output=True, text=True, cwd=folder
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            return f"failed: {lines[-1].strip()}"
        return digest(out)


def main() -> None:
    """Compute or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compute")
    one.add_argument("file", type=Path)
    one.add_argument("--only", default="*")
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compute":
        chosen = {name: arguments for name, arguments in runs().items() if fnmatch.fnmatch(name, options.only)}
        known = json.loads(options.file.read_text(encoding="utf-8"))["runs"] if options.file.exists() else {}
        with ThreadPoolExecutor(2) as pool:
            results = dict(zip(chosen, pool.map(compute, chosen.values()), strict=True))
        results = {**known, **results}
        options.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**environment(), "commit": source_commit(), "runs": results}, indent=2)
        options.file.write_text(text + "\n", encoding="utf-8")
        failed = [name for name, value in results.items() if value.startswith("failed")]
        print(f"{len(results)} runs, {len(failed)} failed", *(f"{n}: {results[n]}" for n in failed), sep="\n")
        return
    before, after = (json.loads(p.read_text(encoding="utf-8"))["runs"] for p in (options.before, options.after))
    common = [name for name in before if name in after]
    different = [name for name in common if before[name] != after[name]]
    print(f"{len(common) - len(different)} of {len(common)} runs are equal to the bit, tensors and records")
    for name in different:
        same_tensors = before[name].split()[0] == after[name].split()[0] != "failed:"
        print(f"different: {name}: {'records only' if same_tensors else after[name]}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
