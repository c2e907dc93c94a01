"""Engine: is what extraction and serving need of vLLM or SGLang there, as in the releases it was tried with?"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from eyas.preflight import failures
from eyas.preflight.child import import_modules
from eyas.preflight.contract import changed, read_installed
from eyas.preflight.contracts import known
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.preflight.packages import environment

# What extraction and serving of a draft need of an engine, and what for.
NEEDS = {
    "vllm": {
        "vllm.config.speculative.SpeculativeConfig": "speculative decoding",
        "vllm.config.kv_transfer.KVTransferConfig": "handing out hidden states",
        "vllm.v1.spec_decode.extract_hidden_states.ExtractHiddenStatesProposer": "extracting hidden states",
        "vllm.transformers_utils.configs.extract_hidden_states"
        ".ExtractHiddenStatesConfig": "extracting hidden states",
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
        ".ExampleHiddenStatesConnector": "writing hidden states to files",
        "vllm.model_executor.models.interfaces.SupportsEagle3.set_aux_hidden_state_layers": "choosing aux layers",
        "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM.load_weights": "loading a draft",
        "vllm.transformers_utils.configs.speculators.base.SpeculatorsConfig": "reading a draft's config",
    },
    "sglang": {
        "sglang.srt.server_args.ServerArgs": "starting the server",
        "sglang.srt.entrypoints.engine.Engine.generate": "returning hidden states",
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.load_weights": "loading a draft",
    },
}


def engine_has_its_interface(s: Subject) -> Iterator[Finding]:
    assert s.engine is not None
    env, needs, releases = environment(s), NEEDS[s.engine], known(s, s.engine)
    if env.modules.get(s.engine) is None:
        hint = f"`{env.executable} -m pip install {s.engine}`, or name its interpreter with --python"
        yield error(f"{s.engine} is not installed for {s.python}", hint)
        return
    now = read_installed(s.python, s.engine, releases[-1].of, Path(os.devnull), s.import_limit)
    older = [c for c in releases if Version(c.version) <= Version(now.version)]
    then = (older or releases)[-1]
    evidence = {"installed": now.version, "compared_with": then.version}
    missing = 0
    for name, purpose in needs.items():
        a, b = (c.look_up(name) for c in (then, now))
        if b is None:
            missing += 1
            having = [c.version for c in releases if c.look_up(name)]
            install = f"`{env.executable} -m pip install {s.engine}=={having[-1]}`"
            hint = f"{s.engine} {', '.join(having)} have it: {install}"
            yield error(f"{s.engine} {now.version} has no `{name}`: no {purpose}", hint, evidence | {"name": name})
        elif a and (drift := list(changed(a, b))):
            text = f"`{name}` ({purpose}) is not as in {s.engine} {then.version}: {', '.join(drift)}"
            yield warning(text, f"tested: {', '.join(c.version for c in releases)}", evidence | {"drift": drift})
    yield info(
        f"{s.engine} {now.version}: {len(needs) - missing} of {len(needs)} parts are there", evidence=evidence
    )
    modules = list(dict.fromkeys(now.split(name)[0] for name in needs if now.look_up(name)))
    nothing: dict[str, Any] = {"names": {}, "froms": [], "all": []}
    replies = import_modules(s.python, s.engine, modules, s.import_limit, Path(os.devnull), **nothing)
    for module, reply in replies.items():
        if reply.result is None:  # one cause is enough: the others fail on the same mostly
            text, hint = failures.explain(env, module, reply)
            yield error(f"{s.engine} {now.version}: {text}", hint, evidence | {"stderr": reply.stderr[-1000:]})
            return


CHECKS = [Check("engine", "imports", ("python",), engine_has_its_interface, "engine")]
