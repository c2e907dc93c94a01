"""Deploy: would servers load a draft as it was trained? The dry run's, and one in a folder that is named."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from eyas.export.export import write_layout
from eyas.export.verify import check
from eyas.preflight.dry_run import no_room
from eyas.preflight.finding import Check, Finding, Subject, error, info

AGAIN = "export it again, or write what is said to be wrong"


def exports_prove_themselves(s: Subject) -> Iterator[Finding]:
    """The export stage on the draft as it is now, in every layout asked for."""
    draft, config = s.trial.cpu().eval(), s.config
    samples = s.store.spread(4)
    if reason := no_room(sum(t.nbytes for t in draft.state_dict().values())):
        yield info(f"not tried: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="eyas-deploy-") as root:
        for layout in config.export.layouts:
            folder = Path(root) / layout
            write_layout(folder, layout, draft, s.spec, config.export.dtype, config.evaluate.draft_tokens)
            checked = check(folder, s.spec, draft, samples)
            for f in checked["findings"]:
                yield Finding(f["level"], f"{layout}: {f['message']}", f["hint"])
            if checked["ok"]:
                apart = checked["proof"]["largest_difference"]
                text = f"{layout}: reloaded from its files, logits within {apart:.1e} of the draft's"
                yield info(text, evidence=checked["proof"])


def folder_would_be_served(s: Subject) -> Iterator[Finding]:
    """The findings of `eyas verify` on the folder that --draft names."""
    assert s.draft is not None
    if not s.draft.is_dir():
        yield error(f"draft {s.draft} is not a folder", "give a local folder: config.json and weights")
        return
    checked = check(s.draft, s.spec if s.target_name else None)
    for f in checked["findings"]:
        yield Finding(f["level"], f"{s.draft}: {f['message']}", f["hint"] or AGAIN)
    compared = f"against {s.target_name}" if s.target_name else "without a target: name it with --target"
    yield info(f"{s.draft} is of the {checked['format']} layout, looked at {compared}")


CHECKS = [
    Check("export", "deploy", ("fresh", "draft"), exports_prove_themselves),
    Check("draft_folder", "deploy", (), folder_would_be_served, "draft"),
]
