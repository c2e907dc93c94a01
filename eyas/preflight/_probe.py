"""Run by the interpreter under test, in a process of its own: `python _probe.py JOB OUT FOLDER`.

Only the standard library is used and Python 3.9 is enough, so any environment can be asked, with or without eyas
in it. JOB is a JSON file; answers are appended to OUT, one JSON object a line, so that what was under way is known
even if the process dies. FOLDER takes the place that a script's own folder has on `sys.path`.
"""

import contextlib
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
import traceback
import warnings

if __package__:
    from eyas.preflight import _devices, _static
else:  # run as a script: this file's folder is first on sys.path until FOLDER takes its place
    import _devices
    import _static

STDLIB = os.path.dirname(os.__file__)


def tell(**facts):
    with open(sys.argv[2], "a") as out:
        out.write(json.dumps(facts) + "\n")


def modules(job):
    """Import what lies above all of the modules, and fork for each: from there its import goes as it would alone,
    and what is slow is imported once. None instead of forks when that would not do: CUDA does not survive one."""
    before, said, start = effects(), [], time.perf_counter()
    if job["base"]:
        said = load(job["base"])
    seconds = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    above = changes(before, effects())
    if job["base"] and (above.get("cuda") or above.get("gpu")) and job["modules"] != [job["base"]]:
        return {"forks": None}
    forks, left = {}, list(job["modules"])
    while left:
        lines = forks[left[0]] = fork(job, left, before, above, said, len(forks))
        covered = lines.get("result") or {"answers": {}, "absent": []}
        done = {left[0], *covered["answers"], *covered["absent"]}
        if not covered["answers"]:  # whatever is below a package that fails, fails with it
            done |= {m for m in left if m.startswith(lines.get("importing", left[0]) + ".")}
        left = [m for m in left if m not in done]
    return {"forks": forks, "seconds": seconds}


def fork(job, left, before, above, said, number) -> dict:
    """One module in a process that starts as this one is now: all that it told, and how it ended."""
    out, start = f"{sys.argv[2]}.{number}", time.perf_counter()
    warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
    pid = os.fork()
    if pid == 0:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[2] = out
        finish(watch(job), lambda: module(job, left, before, above, said))
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.perf_counter() - start
    lines = {"returncode": ended, "seconds": seconds, "trace": _static.read(out + ".trace")}
    for line in _static.read(out).splitlines() if os.path.exists(out) else []:
        lines.update(json.loads(line))
    return dict(lines, stdout=_static.read(out + ".stdout"), stderr=_static.read(out + ".stderr"))


def module(job, left, before, above, said):
    """Import the first module of those left, its packages first; look up names in it and all that came along."""
    parts, said = left[0].split("."), list(said)
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        if name not in sys.modules or name == left[0]:
            said += load(name)
    effect = changes(before, effects())
    for key in ("threads", "processes"):  # a fork does not see those of the process it comes from
        effect[key] = above.get(key, []) + effect.get(key, [])
    answers = {}
    for asked in left:  # submodules that came along are as good as imported alone
        if asked in sys.modules:
            answers[asked] = {"names": [look_up(asked, chain, job) for chain in job["names"].get(asked, [])]}
    # Below a package that is there, a module that cannot be found fails for certain.
    rest = [m for m in left if m not in sys.modules and m.rpartition(".")[0] in sys.modules]
    absent = [m for m in rest if not exists(m)]
    return {"answers": answers, "absent": absent, "deprecated": said, "effects": effect}


def load(name):
    """Import one module; what it says to whoever imports it is old about it."""
    tell(importing=name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module(name)
    # What its own imports say is not the script's affair.
    return deprecations([w for w in caught if "importlib" in w.filename or w.filename == __file__])


def look_up(name, chain, job):
    """Walk a chain of attributes. `missing` is the first that is not there; `holder` is what lacks it."""
    found, holder, said = sys.modules[name], name, []
    for i, attribute in enumerate(chain):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = take(found, holder, attribute, job)
            except Exception as e:
                fault = {"missing": attribute, "holder": holder, "is_module": inspect.ismodule(found)}
                if inspect.ismodule(found):
                    fault["submodule"] = exists(f"{found.__name__}.{attribute}")
                    fault["names"] = [n for n in dir(found) if not n.startswith("_")][:2000]
                return fault | {"error": f"{type(e).__name__}: {e}"}
        said += deprecations(caught)
        holder = f"{holder}.{attribute}" if i else f"{name}.{attribute}"
    text = str(getattr(found, "__deprecated__", ""))
    if text and f"`{chain[-1]}` instead" not in text:  # an alias marks what it stands for as well
        said.append(text)
    where = [getattr(found, "__module__", None), getattr(found, "__qualname__", None)]
    lenient = isinstance(getattr(found, "model_fields", None), dict) and isinstance(found, type)
    lenient = lenient and getattr(found, "model_config", {}).get("extra") != "forbid"
    return {"params": parameters(found), "lives": where, "deprecated": said, "ignores_unknown": lenient}


def take(found, holder, attribute, job):
    try:
        return getattr(found, attribute)
    except AttributeError:
        if not inspect.ismodule(found):
            raise
        path = f"{found.__name__}.{attribute}"
        # `from a import b` reaches for the submodule; elsewhere it must have been imported somewhere in the script
        if [holder, attribute] not in job["froms"] and not any(
            (m + ".").startswith(path + ".") for m in job["all"]
        ):
            raise
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(path)
        raise


def parameters(found):
    """[[name, kind, required]], or None when Python itself does not know."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    empty = inspect.Parameter.empty
    return [[p.name, p.kind.name, p.default is empty] for p in signature.parameters.values()]


def deprecations(caught):
    kinds = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)
    return [str(w.message) for w in caught if issubclass(w.category, kinds)]


def exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return False


def effects():
    """What an import should leave alone."""
    state: dict = {"memory": peak_memory()}
    state["threads"] = [t.name for t in threading.enumerate() if not t.daemon]
    state["folder"], state["devices"] = os.getcwd(), os.environ.get("CUDA_VISIBLE_DEVICES")
    state["processes"], state["gpu"] = [], []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as children:
                state["processes"] += children.read().split()
    with contextlib.suppress(OSError):
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        state["gpu"] = sorted({x for x in links if x.startswith("/dev/nvidia") and x[11:].isdigit()})
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    state["gpu_memory"] = cuda.memory_reserved() if cuda and cuda.is_initialized() else 0
    state["cuda"] = bool(cuda and cuda.is_initialized())
    return state


def peak_memory():
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    import resource  # elsewhere; on Linux it would count the parent's memory as well

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def changes(before, after):
    changed = {key: after[key] for key in after if after[key] != before[key]}
    changed["memory"] = after["memory"] - before["memory"]
    changed["threads"] = [t for t in after["threads"] if t not in before["threads"]]
    return changed


def script(job):
    """Does this Python read the script?"""
    with open(job["path"], "rb") as file:
        text = file.read()
    try:
        compile(text, job["path"], "exec", dont_inherit=True)
    except SyntaxError as e:
        return {"line": e.lineno, "text": (e.text or "").strip(), "message": e.msg}
    return {}


def run(job):
    """Run a few lines of code, and return what they leave in `result`."""
    space = {}
    exec(job["code"], space)
    return space.get("result", {})


def failure(e):
    frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if "importlib" not in f.filename and not f.filename.startswith("<")] or frames
    at = [frames[-1].filename, frames[-1].lineno] if frames else None
    fault = {"type": type(e).__name__, "message": str(e)[:2000], "at": at}
    return fault | {"missing": getattr(e, "name", None), "code": getattr(e, "code", None)}


def watch(job):
    """Have the stack written down when the process crashes, or has not ended in time: then it is ended, too."""
    trace = open(sys.argv[2] + ".trace", "w")  # noqa: SIM115 faulthandler writes to it until the process ends
    faulthandler.enable(trace)
    faulthandler.dump_traceback_later(job["limit"], exit=True, file=trace)
    return trace


def finish(trace, work):
    start = time.perf_counter()
    try:
        told = work()
        tell(result=told, seconds=time.perf_counter() - start)
    except BaseException as e:  # SystemExit and KeyboardInterrupt too: an import may raise anything
        tell(failed=failure(e), seconds=time.perf_counter() - start)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # a thread that the import left behind must not keep the process


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    trace = watch(job)
    sys.path[0], sys.argv[0] = sys.argv[3], job.get("script", sys.argv[0])
    jobs = {"modules": modules, "script": script, "run": run, "torch": _devices.devices}
    jobs.update({"facts": _static.facts, "locate": _static.locate, "record": _static.record})
    tell(stdlib=STDLIB)
    finish(trace, lambda: jobs[job["job"]](job))


if __name__ == "__main__":
    main()
